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
import concurrent.futures, itertools, json, signal, sys, threading, time, urllib.request
url, least, models = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
numbers = itertools.count()
def ask(number):
    body = {"model": models[number % len(models)], "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), header)
    try:
        with urllib.request.urlopen(request, timeout=280) as answer:
            return "" if json.load(answer)["choices"][0]["message"]["content"] else "an empty answer"
    except OSError as error:
        return f"{body['model']}: {error!r}"
def loop(_):
    texts = []
    while not ended.is_set() or len(texts) < least / 3:
        time.sleep(0.3)
        texts.append(ask(next(numbers)))
    return texts
with concurrent.futures.ThreadPoolExecutor(3) as threads:
    texts = [text for texts in threads.map(loop, range(3)) for text in texts]
print(json.dumps({"answered": texts.count(""), "lost": [text for text in texts if text]}))
"""
"""Arguments: URL of the router, number of requests at least, models. Asks them in turn, three at a time, until SIGTERM;
prints how many were answered, and the errors."""
