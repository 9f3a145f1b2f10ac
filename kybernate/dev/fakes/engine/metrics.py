"""/metrics with vLLM's names, in Prometheus' text form; written by hand because a start has to be light."""

from kybernate.dev.fakes.engine.engine import Engine

_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


def metrics_text(engine: Engine) -> str:
    """All metrics of an engine."""
    model = engine.options.model.replace("\\", "\\\\").replace('"', '\\"')
    labels = f'engine="0",model_name="{model}"'
    usage = engine.running / engine.options.max_running
    totals = engine.totals
    lines = [
        *_metric("num_requests_running", "gauge", "Requests being computed.", {labels: engine.running}),
        *_metric("num_requests_waiting", "gauge", "Requests waiting to be computed.", {labels: engine.waiting}),
        *_metric("kv_cache_usage_perc", "gauge", "Share of the KV cache in use; 1 is all.", {labels: usage}),
        *_metric("prompt_tokens_total", "counter", "Prompt tokens computed.", {labels: totals["prompt_tokens"]}),
        *_metric("generation_tokens_total", "counter", "Tokens answered.", {labels: totals["generation_tokens"]}),
        *_metric(
            "request_success_total",
            "counter",
            "Requests answered to the end.",
            {f'{labels},finished_reason="{why}"': totals[f"finished/{why}"] for why in ("stop", "length")},
        ),
        *_metric(
            "engine_sleep_state",
            "gauge",
            "1 for the state that the engine is in.",
            {f'{labels},sleep_state="{name}"': engine.sleep_level == level for level, name in enumerate(_SLEEP_STATES)},
        ),
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, samples: dict[str, float]) -> list[str]:
    family = f"vllm:{name}"
    values = [f"{family}{{{labels}}} {float(value)}" for labels, value in samples.items()]
    return [f"# HELP {family} {text}", f"# TYPE {family} {kind}", *values]
