"""From nothing to three models that answer for a second person: the lines of docs/one-box.md, and those of llama-swap.

Both are typed into a shell: key, TLS, every address of the machine, a systemd unit. Engines are llama.cpp's own server
on the CPU. What is not had here is played: ``pipx`` does nothing (both programs are installed), ``sudo`` runs its
command, ``systemctl`` reads the unit and starts it; ``--driver nvidia`` becomes a fake GPU. The second person asks
at another loopback address. ``KYB_LLAMA_SWAP``: the path of a llama-swap; without it that part is left out.
"""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.swap_rule import LLAMA_SWAP
from kybernate.dev.fakes.engine.llama import write_model
from kybernate.dev.nats_server import free_port

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/one-box.md"
MODELS = ("qwen3-8b", "mistral-7b", "gemma3-12b")
SWAP = """\
curl -L RELEASE/llama-swap_linux_amd64.tar.gz | sudo tar xz -C /usr/local/bin llama-swap
mkdir ~/swap && cd ~/swap
echo sk-$(openssl rand -hex 24) | tee key
cat > config.yaml <<EOF
apiKeys: [$(cat key)]
models:
  qwen3-8b:
    cmd: llama-server -m /models/qwen3-8b.gguf --port \\${PORT}
  mistral-7b:
    cmd: llama-server -m /models/mistral-7b.gguf --port \\${PORT}
  gemma3-12b:
    cmd: llama-server -m /models/gemma3-12b.gguf --port \\${PORT}
EOF
OPENSSL
sudo tee /etc/systemd/system/llama-swap.service <<EOF
[Unit]
After=network-online.target
[Service]
WorkingDirectory=$PWD
ExecStart=llama-swap -config config.yaml -watch-config -listen 0.0.0.0:8780 -tls-cert-file tls.crt -tls-key-file tls.key
Restart=on-failure
[Install]
WantedBy=multi-user.target
EOF
sudo systemctl enable --now llama-swap
"""
SECOND = "127.77.0.2"
"""``box.lan`` as the second person reaches it."""


@dataclass
class Walk:
    """One walk: what was typed, and what came of it."""

    lines: int = 0
    characters: int = 0
    seconds: float = 0.0
    """From the first line to the third model's answer."""
    texts: dict[str, str] = field(default_factory=dict)
    """What each model answered the second person."""
    key: str = ""
    """Of the second person."""


async def run() -> dict[str, float]:
    """Return lines, characters and seconds of each."""
    found: dict[str, float] = {}
    for name, lines in [("kybernate", typed()), *([("llama_swap", _swap())] if LLAMA_SWAP else [])]:
        async with walked(lines) as (walk, _):
            found |= figures(name, walk)
    return found


def figures(name: str, walk: "Walk") -> dict[str, float]:
    """Lines, characters and seconds of one. Raises RuntimeError where two models gave the same answer."""
    if len(set(walk.texts.values())) != len(MODELS):
        raise RuntimeError(f"{name}: {walk.texts}")
    return {f"{name}_lines": walk.lines, f"{name}_characters": walk.characters, f"{name}_s": walk.seconds}


def typed() -> list[str]:
    """The lines of the page on the box; the last is the second person's."""
    part = PAGE.read_text().partition("\n## Three models")[2].partition("\n## ")[0]
    return re.findall(r"^    (.*)$", part, re.MULTILINE)


def _swap() -> list[str]:
    """The lines of llama-swap; the certificate is made as for Kybernate."""
    [certificate] = (line for line in typed() if line.startswith("openssl req"))
    return [SWAP.replace("OPENSSL", certificate)]


@asynccontextmanager
async def walked(lines: list[str]) -> AsyncIterator[tuple[Walk, "Box"]]:
    """Type these lines, then ask each model as the second person, who types one line."""
    *_, asks = typed()
    with tempfile.TemporaryDirectory(prefix="kyb-walk-") as folder:
        box = await asyncio.to_thread(Box, Path(folder))
        walk = Walk()
        text = "\n".join(line for line in lines if line != asks).rstrip("\n") + "\n"
        walk.lines, walk.characters = (text + asks).count("\n") + 1, len(text + asks)
        began = time.monotonic()
        try:
            printed = await box.shell(text)
            walk.key = next(word for word in printed.split() if word.startswith(("kyb_", "sk-")))
            for model in MODELS:
                walk.texts[model] = await box.ask(asks, walk.key, model)
            walk.seconds = time.monotonic() - began
            yield walk, box
        finally:
            await box.stop()


class Box:
    """A machine that is played: its home, its models, its units, and programs that stand before others on PATH."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self._units: dict[str, asyncio.subprocess.Process] = {}
        for name in ("bin", "home", "models", "units", "run"):
            (folder / name).mkdir()
        for model in MODELS:
            write_model(folder / "models" / f"{model}.gguf", model)
        python, server = shlex.quote(sys.executable), ROOT / "tests/engines/llama_server.py"
        self._program("llama-server", f'exec {python} {server} "$@"')
        self._program("sudo", 'exec "$@"')
        self._program("pipx", "exit 0")
        self._program(
            "tee", f'case $1 in /etc/*) exec /usr/bin/tee {folder}/units/"${{1##*/}}" ;; esac; exec /usr/bin/tee "$@"'
        )
        self._program(
            "systemctl", f'echo "$*" > {folder}/units/asked; while [ -e {folder}/units/asked ]; do sleep 0.05; done'
        )
        (folder / "bin" / "kyb").symlink_to(Path(sys.executable).with_name("kyb"))
        if LLAMA_SWAP:
            (folder / "bin" / "llama-swap").symlink_to(LLAMA_SWAP)
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("KYB_", "SSL_"))}
        self._env = keep | {
            "HOME": str(folder / "home"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "PATH": f"{folder}/bin:{keep.get('PATH', os.defpath)}",
            "PYTHONPATH": str(ROOT),
        }

    def _program(self, name: str, body: str) -> None:
        file = self._folder / "bin" / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def _here(self, text: str) -> str:
        """The same with what this machine has."""
        text = re.sub(r"^curl -L RELEASE.*$", "", text, flags=re.MULTILINE)
        text = text.replace("--driver nvidia", f"--gpus 1 --memory 24GiB --port {self._port}")
        text = text.replace("/models/", f"{self._folder}/models/").replace("8780", str(self._port))
        return re.sub(r"--port 900\d", lambda _: f"--port {free_port()}", text)

    async def shell(self, text: str) -> str:
        """Type these lines into one shell; what it printed. Raises RuntimeError if one fails."""
        process = await asyncio.create_subprocess_exec(
            *("bash", "-e"),
            env=self._env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        typing = asyncio.create_task(process.communicate(self._here(text).encode()))
        serving = asyncio.create_task(self._systemd())
        try:
            await asyncio.wait((typing, serving), timeout=180, return_when=asyncio.FIRST_COMPLETED)
            if not typing.done():
                os.killpg(process.pid, signal.SIGKILL)
                await serving  # its error is why
            printed, _ = await typing
        finally:
            serving.cancel()
        if process.returncode:
            raise RuntimeError(f"code {process.returncode}: {printed.decode()}")
        return printed.decode()

    async def _systemd(self) -> None:
        """Start each unit that ``systemctl enable --now`` names."""
        asked = self._folder / "units" / "asked"
        while True:
            await asyncio.sleep(0.05)
            if asked.exists() and (words := asked.read_text().split()):
                await self.start(words[-1])
                asked.unlink()

    async def start(self, name: str) -> None:
        """Start a unit, and wait until it is ready if it says so."""
        rows = [
            line.partition("=")[::2] for line in (self._folder / "units" / f"{name}.service").read_text().split("\n")
        ]
        keys, env = dict(rows), dict(self._env)
        for key, value in rows:
            if key == "Environment":
                [word] = shlex.split(value)
                env[word.partition("=")[0]] = word.partition("=")[2].replace("%%", "%")
        ready = asyncio.Event()
        loop = asyncio.get_running_loop()
        address = self._folder / "run" / "notify"
        address.unlink(missing_ok=True)

        class Ready(asyncio.DatagramProtocol):
            def datagram_received(self, data: bytes, _: object) -> None:
                if data == b"READY=1":
                    ready.set()

        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listening.bind(str(address))
        transport, _ = await loop.create_datagram_endpoint(Ready, sock=listening)
        env = {**env, "NOTIFY_SOCKET": str(address), "PATH": self._env["PATH"]}
        log = (self._folder / "units" / f"{name}.log").open("ab")
        self._units[name] = await asyncio.create_subprocess_exec(
            *shlex.split(keys["ExecStart"]), cwd=keys["WorkingDirectory"], env=env, stdout=log, stderr=log
        )
        log.close()
        try:
            if keys.get("Type") == "notify":
                async with asyncio.timeout(120):
                    await ready.wait()
        finally:
            transport.close()

    async def ask(self, line: str, key: str, model: str, *, once: bool = False) -> str:
        """What a model answers the second person, who types this line until the box answers. Raises RuntimeError after
        60 s, or with ``once``."""
        home = self._folder / "home"
        [certificate] = home.glob("*/tls.crt")
        text = line.replace("--cacert tls.crt", f"--cacert {certificate} --resolve box.lan:8780:{SECOND}")
        text = self._here(text.replace("qwen3-8b", model)).replace("$KEY", key)
        until = time.monotonic() + 60
        while True:
            process = await asyncio.create_subprocess_exec(
                *("bash", "-c", f"{text} -s -S --max-time {10 if once else 60}"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            printed, _ = await process.communicate()
            try:
                return str(json.loads(printed)["choices"][0]["message"]["content"])
            except (ValueError, KeyError, TypeError):
                if once or time.monotonic() > until:
                    raise RuntimeError(f"{model}: {printed.decode()}\n{self.logs()}") from None
                await asyncio.sleep(0.2)

    async def stop(self) -> None:
        """End every unit, as a reboot does."""
        for process in self._units.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                await process.wait()
        self._units.clear()

    def logs(self) -> str:
        """What the units wrote."""
        return "\n".join(file.read_text()[-3000:] for file in (self._folder / "units").glob("*.log"))
