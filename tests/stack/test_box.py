"""``kyb up`` on one machine that people use: its GPUs, keys, TLS, the unit."""

import asyncio
import fcntl
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from kybernate import local_stack
from kybernate.cli import main
from kybernate.cli.output import CliError
from kybernate.dev import logs as logs_of
from kybernate.dev import up
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.stubs import StubError, build_stubs
from kybernate.dev.stack import StackOptions
from kybernate.dev.stack.layout import Ports, commands, lay_out
from kybernate.dev.stack.options import check
from kybernate.http_api import unanswered
from kybernate.local_stack import log_lines
from kybernate.settings import known_options
from services.router.settings import RouterSettings
from tests.test_tls import make
from tests.until import TIME_FACTOR, until

ON_GPUS = """
import asyncio, json, os, sys, urllib.request
from pathlib import Path
from kybernate.dev.stack import LAPTOP, Stack, StackOptions

async def main():
    fake = {"KYB_FAKE_DRIVER": os.environ["KYB_FAKE_DRIVER"]}
    options = StackOptions(
        driver="nvidia", config=LAPTOP / "small.yaml", pods=Path(sys.argv[1]), port=0, announce=False,
        settings=dict.fromkeys(("plugin", "gpu_manager", "checkpointer"), fake),
        arguments={"kubelet": ("--inject-env", f"KYB_FAKE_DRIVER={fake['KYB_FAKE_DRIVER']}")},
    )
    def ask(model):
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{stack.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    async with Stack(options) as stack:
        await stack.ready(60)
        texts = [await asyncio.to_thread(ask, model) for model in ("tiny", "small", "large", "tiny")]
        with urllib.request.urlopen(f"{stack.console}/v1/seats", timeout=60) as answer:
            homes = {seat["model"]: seat["home_group"] for seat in json.load(answer)["seats"] if seat["model"]}
        print(json.dumps({"names": sorted(stack.pids), "homes": homes, "texts": texts}))

asyncio.run(main())
"""


def cuda_pod(model: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kybernate.dev.fakes.engine", "--cuda", "--model", model, "--vram", "50GiB"]
    container = {"name": "engine", "image": "fake", "command": command}
    container["resources"] = {"limits": {"kyb.ai/gpu-1x-seat": 1}}
    metadata = {"name": model, "annotations": {"kyb.ai/backend": "cuda", "kyb.ai/vram": "50GiB"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


@pytest.mark.timeout(200)
async def test_on_real_gpus_nothing_of_ours_stands_before_nvidias_libraries(tmp_path: Path) -> None:
    """The libraries are stubs and their GPU is fake, of which the stack knows nothing."""
    try:
        stubs = await asyncio.to_thread(build_stubs)
    except StubError as error:
        pytest.skip(str(error))
    pods, socket = tmp_path / "pods.yaml", tmp_path / "driver.sock"
    pods.write_text(yaml.safe_dump_all(map(cuda_pod, ("tiny", "small", "large"))))
    driver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kybernate.dev.fakes.gpu", "--socket", str(socket), "--gpus", "2"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        client = await FakeDriverClient.connect(socket, wait_seconds=20)
        env = os.environ | {"LD_LIBRARY_PATH": str(stubs), "KYB_FAKE_DRIVER": str(socket)}
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ON_GPUS, str(pods)), env=env, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(150 * TIME_FACTOR):
            printed, _ = await child.communicate()
        assert child.returncode == 0
        found = json.loads(printed)
        assert found["names"] == ["checkpointer", "console", "gpu_manager", "kubelet", "nats", "plugin", "router"]
        assert sorted(Counter(found["homes"].values()).values()) == [1, 2], "a GPU for each, as long as there is one"
        assert found["texts"][0] == found["texts"][3]
        assert len({*found["texts"]}) == 3
        assert (await client.call("stats"))["violations"]["count"] == 0
        await client.close()
    finally:
        driver.send_signal(signal.SIGTERM)
        await driver.wait()


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (("--driver", "nvidia"), {}, "--driver nvidia needs --pods FILE"),
        ((), {"KYB_TLS_CERT_FILE": "tls.crt"}, "KYB_TLS_CERT_FILE needs KYB_ROUTER_URL.*https://NAME:8780"),
        ((), {"KYB_TLS_CERT_FILE": "tls.crt", "KYB_ROUTER_URL": "http://box.lan:8780"}, "KYB_ROUTER_URL.*https://NAME"),
    ],
)
def test_what_a_box_needs_is_named(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["up", *arguments])
    assert re.search(text, capsys.readouterr().err)


def test_a_stack_gets_every_setting_of_the_router_that_it_does_not_decide() -> None:
    decided = {"node", "instance", "speed", "log_format", "log_level", "port", "health_host", "health_port"}
    decided |= {"advertise_url", *(name for name in RouterSettings.options() if name.startswith("nats_"))}
    assert {name.lower() for name in up.SETTINGS["router"]} == RouterSettings.options().keys() - decided
    environment = {"KYB_HOST": "0.0.0.0", "KYB_PARK_ALLOW": "nccl", "KYB_ALIASES": "", "KYB_NODE": "x", "HOST": "y"}
    found = {process: given for process, given in up.settings_of(environment).items() if given}
    assert found == {"router": {"KYB_HOST": "0.0.0.0"}, "checkpointer": {"KYB_PARK_ALLOW": "nccl"}}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"KYB_HOST": "nonsense.invalid"}, "KYB_HOST=nonsense.invalid: this machine cannot listen there"),
        ({"KYB_HOST": "192.0.2.1"}, "KYB_HOST=192.0.2.1: this machine cannot listen there"),
        ({"KYB_API_KEYS_FLIE": "keys.yaml"}, "unknown setting KYB_API_KEYS_FLIE: did you mean KYB_API_KEYS_FILE?"),
        ({"KYB_NATS_CERT_FLIE": "x"}, "unknown setting KYB_NATS_CERT_FLIE: did you mean KYB_NATS_CERT_FILE?"),
        ({"KYB_HOTS": "0.0.0.0"}, "unknown setting KYB_HOTS: did you mean KYB_HOST?"),
    ],
)
def test_a_wrong_setting_ends_kyb_up_before_anything_starts(environment: dict[str, str], said: str) -> None:
    with pytest.raises(CliError, match=re.escape(said)):
        up.check_settings(environment)


def test_kyb_up_names_the_settings_that_it_does_not_read() -> None:
    environment = {"KYB_PORT": "9000", "KYB_HOST": "127.0.0.1", "KYB_URL": "x", "KYB_NATS_URL": "y", "HOME": "z"}
    assert up.check_settings(environment) == ["KYB_PORT is set, and kyb up does not read it"]


@pytest.mark.parametrize("name", [option["name"] for option in known_options() if option["kind"] == "env"])
def test_no_setting_of_the_project_is_taken_for_a_typo(name: str) -> None:
    value = "127.0.0.1" if name == "KYB_HOST" else "x"
    assert up.check_settings({name: value}) in ([], [f"{name} is set, and kyb up does not read it"])


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:"),
        ({"router": {"KYB_HOST": "0.0.0.0"}}, "http://127.0.0.1:"),
        ({"router": {"KYB_HOST": "fd00::7"}}, "http://[fd00::7]:"),
        ({"router": {"KYB_HOST": "10.0.0.7", "KYB_TLS_CERT_FILE": "x"}}, "https://10.0.0.7:"),
        ({"console": {"KYB_ROUTER_URL": "https://box.lan:8780"}}, "https://box.lan:8780"),
    ],
)
def test_this_machine_reaches_the_router_where_it_listens(settings: dict[str, dict[str, str]], url: str) -> None:
    options, ports = StackOptions(port=0, settings=settings), Ports()
    try:
        layout = lay_out(check(options), options, ports)
        shutil.rmtree(layout.folder)
        assert layout.url.startswith(url)
        trusted = commands(layout, options)["console"].env.get("KYB_ROUTER_CA_FILE")
        assert trusted == settings.get("router", {}).get("KYB_TLS_CERT_FILE"), "it is the router's authority"
    finally:
        ports.release()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_the_unit_is_one_that_systemd_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program := tmp_path / "kyb").symlink_to("/bin/true")
    monkeypatch.setattr(sys, "argv", [str(program), "up", "--unit"])
    monkeypatch.chdir(tmp_path)
    given = {"KYB_HOST": "0.0.0.0", "KYB_ALIASES": "a$=b", "PATH": "/a:/50%", "KYB_NODE": "x", "SSL_CERT_FILE": "x"}
    text = up.unit_of(["--pods", "my models$.yaml"], given)
    assert f'ExecStart={program} up --pods "my models$$.yaml"\n' in text
    assert f"WorkingDirectory={tmp_path}\n" in text
    assert (
        "Environment=KYB_HOST=0.0.0.0\nEnvironment=KYB_ALIASES=a$=b\nEnvironment=PATH=/a:/50%%\nEnvironment=TMPDIR=/var/lib/kybernate\n"
        in text
    )
    assert "SSL_CERT_FILE" not in text, "each engine would inherit it, and verify no public server any more"
    (unit := tmp_path / "kybernate.service").write_text(text)
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert [line for line in checked.stderr.splitlines() if "kybernate.service" in line] == []


def test_a_login_finds_the_stack_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    monkeypatch.setattr(local_stack, "_without_runtime", lambda: tmp_path / "stack.json")
    (tmp_path / "stack.json").write_text('{"url": "x"}')
    assert local_stack.find_stack() is None
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert local_stack.find_stack() == {"url": "x"}
    os.close(lock)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["remove", "qwen"], 1, "kyb up starts one; in a cluster: kubectl delete"),
        (["add", "pods.yaml"], 1, "kyb up starts one; in a cluster: kubectl apply"),
        (["add", "a.yaml", "b.yaml"], 2, "a.yaml: write one FILE, or MODEL -- COMMAND"),
    ],
)
def test_a_wrong_change_of_models_says_what_to_type(
    arguments: list[str],
    code: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if code == 2:
        stack = {"folder": str(tmp_path), "console": "http://127.0.0.1:1"}
        for module in ("dev.local_stack", "cli.console"):
            monkeypatch.setattr(f"kybernate.{module}.find_stack", lambda: stack)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match=f"^{code}$"):
        main(arguments)
    assert text in capsys.readouterr().err


async def test_a_certificate_that_is_refused_is_named(tmp_path: Path) -> None:
    make(tmp_path, ca="own")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "own-server.crt", tmp_path / "own-server.key")
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError) as refused:
            await session.get(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    assert unanswered(refused.value).startswith("its certificate is refused: ")
    assert "local issuer" in unanswered(refused.value)


async def test_a_log_that_has_grown_too_long_begins_anew_and_is_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_of, "LOG_BYTES", 100)
    monkeypatch.setattr(logs_of, "LOG_SECONDS", 0.05)
    logs = [tmp_path / "logs" / "router.log", tmp_path / "logs" / "console.log"]
    logs[0].parent.mkdir()
    for log in logs:
        log.write_text("first\n" * 30)
    seen: list[str] = []
    following = log_lines(logs[1], last=30, follow=True)
    for _ in range(30):
        seen.append(next(following))
    with logs[1].open("a") as writer:
        task = asyncio.create_task(logs_of.bound_logs(tmp_path, "logs/*.log"))
        await until(lambda: all(log.stat().st_size == 0 for log in logs), what="both are empty")
        task.cancel()
        writer.write("second\n")
    seen.append(await asyncio.to_thread(next, following))
    assert seen == ["first"] * 30 + ["second"]
    assert logs[1].with_suffix(".log.1").read_text() == "first\n" * 30
