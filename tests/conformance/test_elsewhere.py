"""The suite against a kubelet in another process, played by the fake kubelet."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from bench.node import Program, short_folder
from tests.conformance.items import ITEMS
from tests.until import until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = ("test_owners.py",)


async def suite(*arguments: str) -> str:
    """Run tests of this suite as a person would; their summary. Fails when they do."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KYB_", "PYTEST_"))}
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
    assert child.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.timeout(180)
async def test_the_suite_runs_on_a_kubelet_of_which_only_the_folder_is_known() -> None:
    with short_folder() as folder:
        device_plugins, address = folder / "k", folder / "k" / "kubelet.json"
        arguments = ("--dir", str(device_plugins), "--run-dir", str(folder / "run"), "--node", "there")
        kubelet = Program("kubelet", ("-m", "kybernate.dev.fakes.kubelet", *arguments), {}, folder)
        await kubelet.start()
        try:
            await until(address.exists, what="kubelet")
            kubectl = f"{sys.executable} {HERE / 'kubectl.py'} {json.loads(address.read_text())['url']} {folder}/run"
            report = folder / "report.json"
            folder_only = ("--kubelet-dir", str(device_plugins), "--conformance-report", str(report))
            assert "needs pods: say --conformance-kubectl" in await suite(*folder_only)
            without = json.loads(report.read_text())["real"]["items"]
            summary = await suite(*folder_only, "--conformance-kubectl", kubectl, "--conformance-node", "there")
            assert "fake kubelet only: looks for the processes of a pod that is gone" in summary
            assert "needs pods" not in summary
            found = json.loads(report.read_text())["real"]["items"]
        finally:
            await kubelet.stop()
    assert set(found) == set(without) <= {str(number) for number in ITEMS}
    assert (without["46"], without["48"]) == ("partly", "skipped")
    assert (found["46"], found["48"], found["52"]) == ("passed", "passed", "skipped")
