"""``kyb logs``, ``kyb status --services``, ``kyb top`` and ``kyb doctor``, beside a stack of this machine."""

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kybernate.cli.console import stack_file
from kybernate.cli.show import top_text
from kybernate.dev.stack.stack_file import StackFile

if TYPE_CHECKING:
    from tests.cli.conftest import SmallRouter
    from tests.command import Kyb


@pytest.fixture
def stack(kyb: "Kyb", router: "SmallRouter", tmp_path: Path) -> Iterator[Path]:
    """The folder of a running stack with two processes, of which one runs, and one engine."""
    folder = tmp_path / "kyb-1"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "router.log").write_text("".join(f"line {number}\n" for number in range(300)))
    (folder / "logs" / "gpu_manager.log").write_text("the ledger is broken, password=hunter2\n")
    engine = folder / "run" / "pods" / "demo_gemma_uid-7" / "engine.log"
    engine.parent.mkdir(parents=True)
    engine.write_text("loading weights\n")
    file = StackFile()
    assert file.claim()
    file.write({"url": router.url, "console": router.url, "folder": str(folder), "pids": {"router": os.getpid()}})
    yield folder
    file.release()


async def test_the_log_of_a_service_or_of_a_models_engine_is_shown(kyb: "Kyb", stack: Path) -> None:
    assert (await kyb("logs", "router", "-n", "2")).out.splitlines() == ["line 298", "line 299"]
    assert (await kyb("logs", "router", "-n", "0")).out == ""
    assert "the ledger is broken" in (await kyb("logs", "gpu-manager")).out
    assert (await kyb("logs", "model/gemma-3-27b")).out == "loading weights\n"
    (stack / "run" / "pods" / "demo_gemma_uid-7" / "engine.log").unlink()
    assert "gemma-3-27b has no log, for its engine never ran; see kyb why" in (await kyb("logs", "gemma-3-27b")).err
    unknown = await kyb("logs", "nothing")
    assert (unknown.code, "gpu_manager, router" in unknown.err) == (1, True), stack


@pytest.mark.parametrize("command", ["add gemma -- vllm", "remove gemma-3-27b", "edit", "logs router", "report usage"])
@pytest.mark.parametrize("how", ["--url", "KYB_URL"])
async def test_a_command_about_this_machine_changes_no_other_stack_than_the_one_named(
    kyb: "Kyb", stack: Path, router: "SmallRouter", monkeypatch: pytest.MonkeyPatch, command: str, how: str
) -> None:
    monkeypatch.setattr("kybernate.dev.stack.pod_changes.add_command", lambda *_: pytest.fail("it was changed"))
    monkeypatch.setattr("kybernate.dev.stack.pod_changes.remove", lambda *_: pytest.fail("it was changed"))
    monkeypatch.setattr("kybernate.dev.stack.pod_changes.edit", lambda *_: pytest.fail("it was changed"))
    given = () if how == "KYB_URL" else ("--url", "http://127.0.0.1:19801")
    monkeypatch.setenv("KYB_URL", "http://127.0.0.1:19801" if how == "KYB_URL" else "")
    name, *more = command.split()
    refused = await kyb(name, *(given if name != "report" else ()), *more, *(given if name == "report" else ()))
    assert (refused.code, refused.out) == (2, ""), stack
    assert "http://127.0.0.1:19801 is another stack's console" in refused.err
    assert f"the one that runs here, whose console is {router.url}" in refused.err


async def test_services_that_do_not_run_are_named(kyb: "Kyb", stack: Path) -> None:
    text = (await kyb("status", "--services")).out
    assert "gpu_manager    does not run: kyb logs gpu_manager" in text
    assert f"router         pid {os.getpid()}" in text
    body = json.loads((await kyb("status", "--services", "-o", "json")).out)
    assert {row["name"]: row["running"] for row in body["services"]} == {"gpu_manager": False, "router": True}, stack
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)  # returns when it is stopped
        content = json.loads(stack_file().read_text())
        content["pids"]["gpu_manager"] = sleeper.pid
        stack_file().write_text(json.dumps(content))
        text = (await kyb("status", "--services")).out
        assert f"gpu_manager    is stopped: kill -CONT {sleeper.pid}" in text
    finally:
        sleeper.kill()
        sleeper.wait()


async def test_the_doctor_names_what_keeps_the_start_gate_of_this_machine_shut(kyb: "Kyb", stack: Path) -> None:
    call = stack / "run" / "seats" / "s1" / "call.json"
    call.parent.mkdir(parents=True)
    os.mknod(call.with_name("gate.sock"), stat.S_IFSOCK | 0o600)
    call.write_text("{}")
    os.utime(call, (1.0, 1.0))
    findings = json.loads((await kyb("doctor", "-o", "json")).out)["findings"]
    gate = [finding["finding"] for finding in findings if finding["check"] == "start gate"]
    assert "the call of s1 is over and still there" in gate[0]


async def test_the_model_that_waits_longest_against_its_slo_comes_first(kyb: "Kyb", router: "SmallRouter") -> None:
    lines = (await kyb("top", "--url", router.url)).out.splitlines()
    assert lines[0].split()[:4] == ["model", "group", "state", "waiting"]
    assert lines[1].split()[:5] == ["gemma", "G0", "parked", "3", "8.2"]
    rows = json.loads((await kyb("top", "-o", "json", "--url", router.url)).out)["models"]
    assert [row["model"] for row in rows] == ["gemma", "qwen", "phi"]
    rows[0] |= {"model": "mistral-small-24b", "stage": "the checkpointer parks s0 " * 4}
    lines = top_text(rows).plain.splitlines()
    assert max(map(len, (*lines[:2], *lines[3:]))) <= 80
    assert "m" * 61 not in top_text([rows[0] | {"model": "m" * 512}]).plain
    assert lines[2] == f"  {rows[0]['stage']}", "what it waits for has a separate line, which the terminal wraps"


async def test_the_doctor_reads_the_stack_and_packs_what_a_report_needs(
    kyb: "Kyb", stack: Path, tmp_path: Path
) -> None:
    file = tmp_path / "report.tar.gz"
    done = await kyb("doctor", "-o", "json", "--bundle", str(file))
    found = {finding["check"]: finding for finding in json.loads(done.out)["findings"]}
    assert done.code == 1
    assert "gpu_manager does not run" in found["processes"]["finding"]
    assert "quarantined: a foreign process holds GPU 1" in found["seat"]["finding"]
    assert "http://x does not answer" in found["manager"]["finding"]
    listed = subprocess.run(["tar", "-tzf", str(file)], capture_output=True, text=True, check=True).stdout.split()
    names = {"doctor.json", "seats.json", "why.json", "events.jsonl", "logs/gpu_manager.log"}
    names |= {"run/pods/demo_gemma_uid-7/engine.log"}
    assert {f"kybernate/{name}" for name in names} <= set(listed)
    logged = ["tar", "-xzOf", str(file), "kybernate/logs/gpu_manager.log"]
    text = subprocess.run(logged, capture_output=True, text=True, check=True).stdout
    assert text.startswith("the ledger is broken, password=REDACTED"), stack


async def test_without_a_stack_the_commands_name_the_remedy(kyb: "Kyb") -> None:
    for argv in (("logs", "router"), ("status", "--services")):
        done = await kyb(*argv)
        assert (done.code, "kyb up" in done.err) == (1, True)
    done = await kyb("doctor")
    assert done.code == 1
    assert done.out.startswith("FAIL console")
    assert len(done.out.splitlines()) == 1
