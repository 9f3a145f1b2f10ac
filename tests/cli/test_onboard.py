"""kyb onboard: published-style manifests become seats."""

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from kybernate.onboard import OnboardError, onboard

if TYPE_CHECKING:
    from tests.command import Kyb

ROOT = Path(__file__).parents[2]
EXAMPLES = {name: ROOT / "examples" / "onboard" / f"{name}.yaml" for name in ("vllm", "sglang", "ollama")}
MODELS = {"vllm": "", "sglang": "", "ollama": "gemma3:12b"}
Json = dict[str, Any]


def example(name: str) -> Json:
    found: Json = yaml.safe_load(EXAMPLES[name].read_text())
    return found


def deployment(image: str, *args: str, command: tuple[str, ...] = (), **container: Any) -> Json:
    """A Deployment of one container on one GPU."""
    one = {"name": "engine", "image": image, "args": list(args), "resources": {"limits": {"nvidia.com/gpu": 1}}}
    one |= ({"command": list(command)} if command else {}) | container
    spec = {"template": {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [one]}}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": spec}


def container(manifest: Json) -> Json:
    found: Json = manifest["spec"]["template"]["spec"]["containers"][0]
    return found


def annotations(manifest: Json) -> Json:
    found: Json = manifest["spec"]["template"]["metadata"]["annotations"]
    return found


LLAMA, TRT, VLLM = "ghcr.io/ggml-org/llama.cpp", "nvcr.io/nvidia/tensorrt-llm/release:1.0.0", "vllm/vllm-openai:v0.10.2"
GGUF = ("-m", "/models/qwen.gguf", "--alias", "qwen", "--port", "8080")
SERVE = ("serve", "Qwen/Qwen3-8B", "--host", "0.0.0.0")
OFFLOAD = ("--model", "qwen", "--kv-offloading-size", "16")
RESTARTED = [
    (deployment(f"{LLAMA}:server-cuda", *GGUF), ["/app/llama-server"]),
    (deployment(f"{LLAMA}:server", "-hf", "ggml-org/gemma-3-4b-it-GGUF", "-a", "gemma"), ["/app/llama-server"]),
    (deployment(f"{LLAMA}:server-cuda-b6000", *GGUF, command=("/app/llama-server",)), ["/app/llama-server"]),
    (deployment("registry.local/llama-server:7", *GGUF, command=("llama-server",)), ["llama-server"]),
    (deployment("ubuntu:24.04", command=("llama-server", *GGUF)), ["llama-server", *GGUF]),
    (deployment(TRT, "trtllm-serve", *SERVE), ["/opt/nvidia/nvidia_entrypoint.sh"]),
    (deployment(TRT, command=("trtllm-serve", *SERVE)), ["trtllm-serve", *SERVE]),
    (deployment(TRT, *SERVE, command=("trtllm-serve",)), ["trtllm-serve"]),
    (deployment(VLLM, *OFFLOAD, command=("vllm", "serve")), ["vllm", "serve"]),
    (
        deployment(VLLM, *OFFLOAD, command=("python3", "-m", "vllm.entrypoints.openai.api_server")),
        ["python3", "-m", "vllm.entrypoints.openai.api_server"],
    ),
]


@pytest.mark.parametrize(("before", "program"), RESTARTED)
def test_an_engine_that_a_restart_parks_gets_kyb_run_in_front(before: Json, program: list[str]) -> None:
    done = onboard(before)
    assert done.backend == "restart"
    assert container(done.manifest)["command"] == ["/kyb/kyb-run", "--", *program]
    assert container(done.manifest).get("args") == container(before).get("args"), "its arguments stay"
    assert any("kubelet counts no restart" in note for note in done.notes)


def test_kyb_run_that_is_in_front_already_stays_alone() -> None:
    before = deployment(f"{LLAMA}:server", *GGUF, command=("/kyb/kyb-run", "--", "/app/llama-server"))
    done = onboard(before)
    assert container(done.manifest)["command"] == ["/kyb/kyb-run", "--", "/app/llama-server"]


@pytest.mark.parametrize(
    "before", [deployment("registry.local/llama-server:7", *GGUF), deployment(VLLM, *OFFLOAD)], ids=["image", "vllm"]
)
def test_an_entrypoint_that_is_not_known_is_asked_for_with_what_it_costs(before: Json) -> None:
    done = onboard(before)
    assert "command" not in container(done.manifest)
    (note,) = [note for note in done.notes if "is not known" in note]
    assert "command: [/kyb/kyb-run, --, …]" in note
    assert "crashLoopBackOff.maxContainerRestartPeriod" in note


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_engine_with_a_sleep_is_started_as_before(name: str) -> None:
    before = example(name)
    after = onboard(before, MODELS[name]).manifest
    assert container(after).get("command") == container(before).get("command")


def test_vllm_sleeps_in_dev_mode() -> None:
    done = onboard(example("vllm"))
    engine = container(done.manifest)
    assert (done.engine, done.backend) == ("vLLM", "vllm")
    assert engine["args"][-2:] == ["--max-model-len=16384", "--enable-sleep-mode"]
    assert {"name": "VLLM_SERVER_DEV_MODE", "value": "1"} in engine["env"]
    assert engine["env"][0]["name"] == "HF_TOKEN"
    assert engine["resources"]["limits"] == {"memory": "48Gi", "kyb.ai/gpu-1x-seat": "1"}
    assert engine["resources"]["requests"] == {"cpu": "4", "memory": "48Gi"}
    assert annotations(done.manifest) == {"kyb.ai/model": "qwen3-8b", "kyb.ai/port": "8000", "kyb.ai/backend": "vllm"}
    assert done.manifest["spec"]["strategy"] == {"type": "Recreate"}
    assert done.manifest["spec"]["template"]["metadata"]["labels"]["kyb.ai/engine"] == "true"
    assert any("livenessProbe" in note for note in done.notes)


SH = ("sh", "-c")


@pytest.mark.parametrize(
    ("command", "args", "env"),
    [
        ((), ("--model", "$(MODEL)", "--port=$(PORT)"), {"MODEL": "org/m", "PORT": "9000"}),
        ((), ("--model=$(MODEL)", "--port", "$(PORT)"), {"ORG": "org", "MODEL": "$(ORG)/m", "PORT": "9000"}),
        ((), ("org/m", "--port=9000", "--hf_overrides", '{"a": 1, "b": "it\'s"}'), {}),
    ],
)
def test_variables_of_a_command_line_are_read_as_its_engine_gets_them(
    command: tuple[str, ...], args: tuple[str, ...], env: dict[str, str]
) -> None:
    variables = [{"name": name, "value": value} for name, value in env.items()]
    done = onboard(deployment(VLLM, *args, command=command, env=variables))
    assert annotations(done.manifest) == {"kyb.ai/model": "org/m", "kyb.ai/port": "9000", "kyb.ai/backend": "vllm"}


SECRET = {"name": "MODEL", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "model"}}}


@pytest.mark.parametrize(
    ("args", "more"),
    [
        (("--model=$(MODEL)",), {"env": [SECRET]}),
        (("--model=$$(MODEL)",), {"env": [{"name": "MODEL", "value": "m"}]}),
        (("--model", "${MODEL}"), {"env": [{"name": "MODEL", "value": "m"}]}),
    ],
    ids=["another object", "an escaped dollar sign", "no shell"],
)
def test_a_model_whose_name_is_not_in_the_manifest_is_asked_for(args: tuple[str, ...], more: dict[str, Any]) -> None:
    manifest = deployment(VLLM, *args, **more)
    with pytest.raises(OnboardError, match=r"its model is \$.*MODEL.*, whose value is not .* give --model NAME"):
        onboard(manifest)
    assert annotations(onboard(manifest, "m").manifest)["kyb.ai/model"] == "m"


def test_switches_follow_the_options_of_the_engine() -> None:
    args = ("m", "--hf-overrides", '{"rope_theta": 1}')
    before = deployment(VLLM, *args)
    after = onboard(before).manifest
    assert container(after)["args"] == [*args, "--enable-sleep-mode"]
    asked = deployment(VLLM, "m", "--enable-sleep-mode=true")
    assert container(onboard(asked).manifest)["args"] == container(asked)["args"]


LIST = r'write vLLM.s words as a list, and try again:\n    command: \["vllm", "serve", "org/m", "--port", "9000"\]'


@pytest.mark.parametrize(
    ("command", "script", "text"),
    [
        (SH, "vllm serve org/m --port 9000", LIST),
        (("/bin/bash", "-c"), "vllm serve \\\n  'org/m' \\\n  --port 9000\n", LIST),
        (SH, "vllm serve $MODEL", "it needs --enable-sleep-mode, VLLM_SERVER_DEV_MODE=1"),
        (SH, "pip list && vllm serve m | tee /log", "without a shell, or the seat by hand"),
        (("/bin/bash", "-e", "-lc"), "vllm serve m", "without a shell"),
        (SH, "vllm serve 'm", "without a shell"),
    ],
)
def test_a_shells_script_is_refused_with_the_words_to_write(command: tuple[str, ...], script: str, text: str) -> None:
    with pytest.raises(OnboardError, match=f"its command is a shell's script, which is not changed here; .*{text}"):
        onboard(deployment(VLLM, script, command=command))


CONNECTOR = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    ("args", "labels", "text"),
    [
        (("m", "--kv-transfer-config", CONNECTOR), {}, r"a KV connector keeps .* \(NixlConnector\); leave it on whole"),
        (("m", "--kv_transfer_config=" + CONNECTOR.replace("Nixl", "P2pNccl")), {}, r"\(P2pNcclConnector\)"),
        (("m", "--kv-transfer-config", CONNECTOR.replace("Nixl", "MooncakeStore")), {}, "MooncakeStoreConnector"),
        (("m", "--kv-transfer-config", CONNECTOR.replace("NixlConnector", "LMCacheConnectorV1")), {}, "LMCache"),
        (("m",), {"llm-d.ai/role": "prefill"}, "only prefills, or only decodes, answers no client alone"),
        (("m", "--disaggregation-mode", "prefill"), {}, "only prefills"),
    ],
)
def test_engines_that_share_their_kv_memory_are_refused(args: tuple[str, ...], labels: Json, text: str) -> None:
    manifest = deployment(VLLM, *args)
    manifest["spec"]["template"]["metadata"]["labels"] |= labels
    with pytest.raises(OnboardError, match=text):
        onboard(manifest)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("InferenceService", "write the seat into spec.predictor"),
        ("LLMInferenceService", "write the seat into spec.template"),
        ("LeaderWorkerSet", "use one pod with several GPUs"),
        ("Job", "is no Deployment or StatefulSet with a name"),
    ],
)
def test_other_kinds_are_refused_with_the_way(kind: str, text: str) -> None:
    with pytest.raises(OnboardError, match=text):
        onboard(deployment(VLLM, "m") | {"kind": kind})


def test_a_stateful_set_keeps_its_way_of_updates() -> None:
    before = deployment(VLLM, "m") | {"kind": "StatefulSet"}
    done = onboard(before)
    assert "strategy" not in done.manifest["spec"]


def test_sglang_on_two_gpus_gets_a_seat_of_two_and_no_exec_probe() -> None:
    done = onboard(example("sglang"))
    engine = container(done.manifest)
    assert engine["args"][-3:] == ["--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-metrics"]
    assert engine["resources"]["limits"] == {"memory": "220Gi", "kyb.ai/gpu-2x-seat": "1"}
    assert engine["readinessProbe"] == {"periodSeconds": 10, "httpGet": {"path": "/health", "port": 30000}}
    assert annotations(done.manifest)["kyb.ai/backend"] == "sglang"


def test_no_probe_of_sglang_computes() -> None:
    probe = {"httpGet": {"path": "/health_generate?a=1", "port": 30000}, "periodSeconds": 10}
    before = deployment("lmsysorg/sglang", "--model-path", "m", readinessProbe=probe)
    done = onboard(before)
    assert container(done.manifest)["readinessProbe"] == {**probe, "httpGet": {"path": "/health", "port": 30000}}
    assert {"name": "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "value": "false"} in container(done.manifest)["env"]
    assert any("/health_generate" in note for note in done.notes)


def test_ollama_keeps_its_model_until_it_is_unloaded() -> None:
    with pytest.raises(OnboardError, match="--model NAME"):
        onboard(example("ollama"))
    done = onboard(example("ollama"), "gemma3:12b")
    env = {one["name"]: one["value"] for one in container(done.manifest)["env"]}
    assert env == {"OLLAMA_KEEP_ALIVE": "-1", "OLLAMA_MAX_LOADED_MODELS": "1"}
    assert container(done.manifest)["startupProbe"]["httpGet"] == {"path": "/", "port": 11434}
    assert annotations(done.manifest)["kyb.ai/backend"] == "unload"


VLLM, TRTLLM = "vllm/vllm-openai", "nvcr.io/nvidia/tensorrt-llm/release:1"
LLAMA = "ghcr.io/ggml-org/llama.cpp:server-cuda"
MODULE = ("python", "-m", "vllm.entrypoints.openai.api_server")


@pytest.mark.parametrize(
    ("manifest", "engine", "backend", "model", "port"),
    [
        (deployment(VLLM, "Qwen/Qwen3-8B", "--port", "9"), "vLLM", "vllm", "Qwen/Qwen3-8B", "9"),
        (deployment("x", "--model=m", command=MODULE), "vLLM", "vllm", "m", "8000"),
        (deployment(VLLM, "--model", "m", "--kv-offloading-backend", "native"), "vLLM", "restart", "m", "8000"),
        (deployment(VLLM, "--model", "m", "--kv-offloading-size=32"), "vLLM", "restart", "m", "8000"),
        (deployment(LLAMA, "-m", "/m.gguf", "-a", "m"), "llama.cpp", "restart", "m", "8080"),
        (deployment(LLAMA, "--models-dir", "/m", "-a", "m"), "llama.cpp", "unload", "m", "8080"),
        (deployment(TRTLLM, command=("trtllm-serve", "m")), "TensorRT-LLM", "restart", "m", "8000"),
        (deployment(TRTLLM, command=("trtllm-serve", "serve", "m")), "TensorRT-LLM", "restart", "m", "8000"),
        (deployment("ollama/ollama", ports=[{"containerPort": 7}]), "Ollama", "unload", "given", "7"),
        (deployment("ghcr.io/huggingface/text-generation-inference:3", "--model-id=m"), "TGI", "cuda", "m", "80"),
    ],
)
def test_engines_are_recognised_by_image_and_arguments(
    manifest: Json, engine: str, backend: str, model: str, port: str
) -> None:
    done = onboard(manifest, "given" if model == "given" else "")
    assert (done.engine, done.backend) == (engine, backend)
    assert annotations(done.manifest) == {"kyb.ai/model": model, "kyb.ai/port": port, "kyb.ai/backend": backend}
    if backend == "restart":
        assert container(done.manifest)["args"] == container(manifest)["args"], "a restart needs no switches"


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ({"kind": "Pod", "metadata": {"name": "x"}}, "no Deployment"),
        ({"kind": "Deployment", "metadata": {"name": "x"}}, "spec.template"),
        (deployment("nginx"), "by image or command"),
        (deployment("vllm/vllm-openai", "--model", "m", resources={}), "--resource"),
        (deployment("vllm/vllm-openai", "--model", "m", "--port", "$(PORT)"), "write a number"),
        (onboard(deployment("vllm/vllm-openai", "--model", "m")).manifest, "kubectl rollout undo deploy/x"),
    ],
)
def test_what_cannot_be_a_seat_is_refused_with_the_remedy(manifest: Json, text: str) -> None:
    with pytest.raises(OnboardError, match=text):
        onboard(manifest)


def test_what_a_user_would_find_out_too_late_is_noted() -> None:
    names = ("--served-model-name", "m", "big", "--api-key", "$(KEY)")
    notes = onboard(deployment(VLLM, "org/m", *names)).notes
    for text in ("as m only, and no longer as big", "kyb.ai/engine-key", "a request past it"):
        assert any(text in note for note in notes), text
    keyed = onboard(deployment(VLLM, "org/m", env=[{"name": "VLLM_API_KEY", "value": "k"}])).notes
    assert any("kyb.ai/engine-key" in note for note in keyed)
    assert not any("only, and no longer" in note or "engine-key" in note for note in onboard(example("vllm")).notes)


def test_a_seat_takes_the_place_of_a_mig_instance() -> None:
    mig = {"limits": {"nvidia.com/mig-3g.40gb": 1, "memory": "9Gi"}}
    with pytest.raises(OnboardError, match="--resource NAME"):
        onboard(deployment(VLLM, "m", resources=mig))
    after = onboard(deployment(VLLM, "m", resources=mig), resource="kyb.ai/mig-seat").manifest
    assert container(after)["resources"]["limits"] == {"memory": "9Gi", "kyb.ai/mig-seat": "1"}


def test_empty_keys_of_a_manifest_count_as_absent() -> None:
    manifest = deployment("vllm/vllm-openai", "--model", "m", resources=None)
    manifest["metadata"]["annotations"] = manifest["spec"]["template"]["metadata"]["annotations"] = None
    done = onboard(manifest, resource="kyb.ai/gpu-1x-seat").manifest
    assert annotations(done)["kyb.ai/model"] == "m"
    assert container(done)["resources"] == {"limits": {"kyb.ai/gpu-1x-seat": "1"}}


@pytest.mark.parametrize("name", EXAMPLES)
async def test_the_examples_pass_the_check_of_pods(name: str, kyb: "Kyb", tmp_path: Path) -> None:
    from kybernate.dev.stack import LAPTOP

    options = ("--model", MODELS[name]) if MODELS[name] else ()
    done = await kyb("onboard", str(EXAMPLES[name]), *options, "-o", "json")
    made = tmp_path / "seat.yaml"
    made.write_text(yaml.safe_dump(json.loads(done.out)["manifest"]))
    good = await kyb("config", "check", str(LAPTOP / "config.yaml"), "--gpus", "4", "--pods", str(made))
    assert (good.code, good.err) == (0, "")
    bad = await kyb("config", "check", str(LAPTOP / "config.yaml"), "--pods", str(EXAMPLES[name]))
    assert (bad.code, "no container asks for a seat" in bad.err) == (2, True)


KUBECTL = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$1 $2" in
  "get services,pods") cat "$PODS" ;;
  get*) cat "$LIVE" ;;
  replace*) cat >"$LIVE" && echo replaced ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a kubectl that answers from its files: live.json, pods.json; and writes down its calls."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, file in (("LIVE", "live.json"), ("PODS", "pods.json"), ("CALLS", "calls")):
        monkeypatch.setenv(name, str(tmp_path / file))
    (tmp_path / "pods.json").write_text('{"items": []}')
    return tmp_path


async def test_a_deployment_of_the_cluster_is_changed_by_kubectl(
    kyb: "Kyb", kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, live, calls = kubectl / "kubectl", kubectl / "live.json", kubectl / "calls"
    before = example("vllm")
    live.write_text(json.dumps(before | {"status": {"replicas": 1}}))
    shown = await kyb("onboard", "deploy/qwen3-8b", "-n", "llms")
    assert (shown.code, "+            kyb.ai/gpu-1x-seat: '1'" in shown.out) == (0, True), shown.out
    assert calls.read_text() == "get -o json deploy/qwen3-8b -n llms\n", "nothing is changed without --apply"
    done = await kyb("onboard", "deploy/qwen3-8b", "--apply")
    assert (done.code, done.out.splitlines()[-1]) == (0, "replaced")
    assert json.loads(live.read_text()) == onboard(before).manifest
    assert (await kyb("onboard", "deploy/qwen3-8b", "--apply")).code == 1, "a seat already"
    program.write_text("#!/bin/sh\nprintf 'E1123 12:08 1 memcache.go:265] again\\nconnection refused\\n' >&2\nexit 1\n")
    assert (await kyb("onboard", "deploy/qwen3-8b")).err == "kyb: kubectl get -o: connection refused\n"
    program.unlink()
    monkeypatch.setenv("PATH", str(kubectl))
    gone = await kyb("onboard", "deploy/qwen3-8b")
    assert (gone.code, "kubectl is not on PATH" in gone.err) == (1, True)


WRITTEN = """#!/bin/sh
case "$1 $2" in
  get*) cat "$LIVE" && sed -i "$CHANGE" "$LIVE" ;;
  replace*)
    cat >"$LIVE.new"
    cmp -s "$LIVE" "$LIVE.new" && exit
    echo "Error from server (Conflict): the object has been modified" >&2 && exit 1 ;;
  patch*) grep -q '"generation": 7' "$LIVE" && cat >"$LIVE.patch" ;;
esac
"""
"""A kubectl whose live.json changes after it was read; a patch takes the place of generation 7 only."""


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [("resourceVersion", '"1"', False), ("generation", "7", True)],
    ids=["status", "spec"],
)
async def test_a_report_of_its_controller_is_no_conflict_and_a_change_of_its_spec_is(
    kyb: "Kyb", kubectl: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: str, refused: bool
) -> None:
    """A Deployment that rolls out gets a new status several times a second, and so another version."""
    monkeypatch.setenv("CHANGE", f's/"{field}": {value}/"{field}": {value.replace("1", "2").replace("7", "8")}/')
    (kubectl / "kubectl").write_text(WRITTEN)
    before = example("vllm")
    before["metadata"] |= {"generation": 7, "resourceVersion": "1"}
    (kubectl / "live.json").write_text(json.dumps(before))
    done = await kyb("onboard", "deploy/qwen3-8b", "--apply")
    if refused:
        assert done.err == "kyb: deploy/qwen3-8b was changed meanwhile, and nothing was written; try again\n"
        return
    assert done.code == 0, done.err
    test, spec = json.loads((kubectl / "live.json.patch").read_text())
    assert test == {"op": "test", "path": "/metadata/generation", "value": 7}
    assert spec == {"op": "replace", "path": "/spec", "value": onboard(before).manifest["spec"]}


async def test_one_of_several_deployments_of_a_file_is_chosen_by_its_name(kyb: "Kyb", tmp_path: Path) -> None:
    first, second = deployment(VLLM, "a"), deployment(VLLM, "b")
    second["metadata"]["name"] = "y"
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump_all([first, {"kind": "Service"}, second]))
    without = await kyb("onboard", str(file))
    assert (without.code, without.err) == (2, f"kyb: {file}: has 2 of x, y; choose one: --name NAME\n")
    file.write_text("kind: Pod")
    assert (await kyb("onboard", str(file))).err == f"kyb: {file}: has no Deployment\n"
    missing = (await kyb("onboard", "deployment/x")).err
    assert missing == "kyb: deployment/x: No such file or directory; name a file, or deploy/NAME of the cluster\n"
    file.write_text(yaml.safe_dump_all([first, {"kind": "Service"}, second]))
    done = await kyb("onboard", str(file), "--name", "y", "-o", "json")
    assert annotations(json.loads(done.out)["manifest"])["kyb.ai/model"] == "b"
