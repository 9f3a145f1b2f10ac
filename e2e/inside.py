"""Programs that run in a pod of the cluster: a stranger who tries connections, and a client under load."""

import json

from e2e.cluster import Cluster, FailedError, run, until

SECURITY = {
    "automountServiceAccountToken": False,
    "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
}
"""Pods of level restricted."""


class Program:
    """A pod that runs one Python program; its last line of output is JSON."""

    def __init__(self, cluster: Cluster, name: str, *, namespace: str | None = None) -> None:
        self._kubectl = ("kubectl", "--namespace", namespace or cluster.namespace)
        self._name = name

    async def start(self, image: str, code: str, *arguments: str, labels: dict[str, str] | None = None) -> None:
        """Returns when kubectl has made the pod. ``labels`` of the pod, besides which it has none of the release's."""
        container = {
            "name": self._name,
            "image": image,
            "command": ["python", "-c", code, *arguments],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        spec = {**SECURITY, "containers": [container]}
        labelled = [f"--labels={','.join(f'{k}={v}' for k, v in labels.items())}"] if labels else []
        await run(
            *(*self._kubectl, "run", self._name, f"--image={image}", "--restart=Never", *labelled),
            f"--overrides={json.dumps({'apiVersion': 'v1', 'spec': spec})}",
        )

    async def stop(self) -> None:
        """Send it SIGTERM."""
        await run(*self._kubectl, "exec", self._name, "--", "python", "-c", "import os; os.kill(1, 15)")

    async def result(self, *, seconds: float = 120.0) -> object:
        """What its last line says; the pod is deleted. Raises FailedError."""

        async def ended() -> bool:
            phase = await run(*self._kubectl, "get", "pod", self._name, "--output=jsonpath={.status.phase}")
            return phase in ("Succeeded", "Failed")

        await until(ended, f"the end of pod {self._name}", seconds=seconds)
        log = await run(*self._kubectl, "logs", self._name)
        await run(*self._kubectl, "delete", "pod", self._name, "--wait=false")
        try:
            return json.loads(log.strip().splitlines()[-1])
        except (IndexError, ValueError):
            raise FailedError(f"pod {self._name} ended with {log.strip()[-400:]!r}") from None


TRY_CONNECTIONS = """
import json, socket, sys, time
until = time.monotonic() + float(sys.argv[1])
def answer(target):
    host, port = target.rsplit(":", 1)
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return "open"
        except OSError as error:
            if time.monotonic() > until:
                return type(error).__name__
        time.sleep(1)
print(json.dumps({target: answer(target) for target in sys.argv[2:]}))
"""
"""Arguments: seconds in which what is closed is tried again, host:port of each target. Prints what each answered:
``open`` or the name of an error."""

ASK_ALL = """
import aiohttp, asyncio, itertools, json, signal, sys
url, least, models = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
numbers, kept = itertools.count(), itertools.count()
async def ask(session, name, number):
    body = {"model": models[number % len(models)], "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    try:
        async with session.post(url + "/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                return f"{name}: {body['model']}: {answer.status} {text}"
            return "" if json.loads(text)["choices"][0]["message"]["content"] else "an empty answer"
    except (aiohttp.ClientError, OSError) as error:
        return f"{name}: {body['model']}: {error!r}"
async def loop(session, name, ended):
    texts = []
    while not ended.is_set() or len(texts) < least / 4:
        await asyncio.sleep(0.3)
        texts.append(await ask(session, name, next(numbers)))
    return texts
async def count(*_):
    next(kept)
async def main():
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    trace, timeout = aiohttp.TraceConfig(), aiohttp.ClientTimeout(total=280)
    trace.on_connection_reuseconn.append(count)
    async with (
        aiohttp.ClientSession(timeout=timeout, trace_configs=[trace]) as keeping,
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as closing,
    ):
        clients = [(keeping, "kept connection"), (closing, "new connection")] * 2
        lists = await asyncio.gather(*(loop(*client, ended) for client in clients))
    texts = [text for texts in lists for text in texts]
    print(json.dumps({"answered": texts.count(""), "kept": next(kept), "lost": [text for text in texts if text]}))
asyncio.run(main())
"""
"""Arguments: URL of the router, number of requests at least, models. Asks them in turn, four at a time, until SIGTERM:
two clients keep their connections, two open one for each request. Prints how many were answered, how many had a
connection that was kept, and the errors."""
