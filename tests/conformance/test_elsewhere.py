"""The suite against a kubelet in another process, played by the fake kubelet."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from bench.node import Program, short_folder
from tests.conformance.items import ITEMS
from tests.until import until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESTART = "test_restarts.py::test_a_restarted_kubelet_gets_every_seat_again_and_running_pods_stay"
TESTS = ("test_owners.py", RESTART)


async def suite(*arguments: str, passes: bool = True) -> str:
    """Run tests of this suite as a person would; their summary. Fails when they do not end as expected."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("KYB_", "PYTEST_")) and name != "CI"
    }
    tests = [str(HERE / name) for name in TESTS]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *arguments),
        cwd=ROOT,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert (child.returncode == 0) is passes, output.decode()
    return output.decode()


@pytest.mark.timeout(180)
async def test_the_suite_runs_on_a_kubelet_of_which_only_the_folder_is_known() -> None:
    with short_folder() as folder:
        device_plugins = folder / "device-plugins"
        address = device_plugins / "kubelet.json"
        arguments = ("--dir", str(device_plugins), "--run-dir", str(folder / "run"), "--node", "there")
        kubelet = Program("kubelet", ("-m", "kybernate.dev.fakes.kubelet", *arguments), {}, folder)
        await kubelet.start()
        try:
            await until(address.exists, what="kubelet")
            url = json.loads(address.read_text())["url"]
            kubectl = f"{sys.executable} {HERE / 'kubectl.py'} {url} {folder}/run"
            fetch = f"from urllib.request import *; urlopen(Request('{url}/control/restart-kubelet', b'{{}}'))"
            restart = f'{sys.executable} -c "{fetch}"'
            report = folder / "report.json"
            folder_only = ("--kubelet-dir", str(device_plugins), "--conformance-report", str(report))
            assert "needs pods: say --conformance-kubectl" in await suite(*folder_only)
            without = json.loads(report.read_text())["real"]["items"]
            more = ("--conformance-kubectl", kubectl, "--conformance-node", "there")
            summary = await suite(*folder_only, *more, "--conformance-kubelet-restart", restart)
            assert "fake kubelet only: looks for the processes of a pod that is gone" in summary
            assert "needs pods" not in summary
            found = json.loads(report.read_text())["real"]["items"]
        finally:
            await kubelet.stop()
    assert set(found) == set(without) <= {str(number) for number in ITEMS}
    assert (without["46"], without["48"]) == ("partly", "skipped")
    assert (found["46"], found["48"], found["52"]) == ("passed", "passed", "skipped")
    assert (without["56"], found["56"]) == ("skipped", "passed")


async def test_the_suite_beside_an_installed_plugin_says_so_in_one_sentence() -> None:
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as installed:
        installed.bind(str(folder / "kyb-gpu-1x-seat.sock"))
        installed.listen()
        summary = await suite("--kubelet-dir", str(folder), passes=False)
    assert "this node has Kybernate's plugin already" in summary
    assert "uninstall it for this suite" in summary
    assert "TimeoutError" not in summary
