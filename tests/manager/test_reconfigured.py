"""The manager as a process whose configuration changes: it begins again with it, or says why not."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

from kybernate.dev.fakes.gpu.node import FakeGpus
from kybernate.node import known_gpus
from tests.kubelet.stand import short_folder
from tests.plugin.processes import PATIENCE, all_logged, driver, environment, logged, process
from tests.plugin.stand import config
from tests.until import until

IMPATIENT = """
from kybernate import lifecycle
from services.gpu_manager.__main__ import main
lifecycle.PREDECESSOR_SECONDS = 0.1
main()
"""
"""A manager that does not wait for its predecessor."""


async def until_logged(log: Path, event: str, times: int = 1) -> dict[str, Any]:
    """The first of these events, once there are so many."""
    await until(lambda: len(all_logged(log, event)) >= times, what=f"log events {event}: {times}", timeout=PATIENCE)
    return dict(all_logged(log, event)[0])


async def test_it_begins_again_with_a_good_configuration_and_stays_with_a_bad_one() -> None:
    with short_folder() as folder:
        env = manager_environment(folder)
        log, file = folder / "manager.log", folder / "config.yaml"
        async with driver(folder), process("-m", "services.gpu_manager", log=log, **env) as manager:
            await until_logged(log, "group.formed", 3)
            file.write_text("profiles: []")
            refused = await until_logged(log, "config.refused")
            assert "config.yaml" in refused["reason"]
            file.write_text(json.dumps(config() | {"drainSeconds": 7}))
            await until_logged(log, "manager.configured", 2)
            await until_logged(log, "group.formed", 6)
            assert len(all_logged(log, "config.applied")) == 1
            file.write_text(json.dumps(config() | {"drainSeconds": 7}))  # another file that says the same
            manager.send_signal(signal.SIGHUP)
            file.write_text(json.dumps(config() | {"drainSeconds": 8}))
            await until_logged(log, "manager.configured", 3)
            waits = len(all_logged(log, "manager.waits"))  # for NATS, again and again: it runs
            await until_logged(log, "manager.waits", waits + 1)
            manager.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(manager.wait(), PATIENCE) == 0
            assert "Traceback" not in log.read_text()


async def test_a_gpu_lost_since_the_start_does_not_change_the_groups_that_the_plugin_knows_as_well() -> None:
    with short_folder() as folder:
        env = manager_environment(folder)
        log, file = folder / "manager.log", folder / "config.yaml"
        async with driver(folder) as gpus, process("-m", "services.gpu_manager", log=log, **env) as manager:
            await until_logged(log, "group.formed", 3)
            await until_logged(log, "manager.waits")
            lost = (await gpus.call("devices"))["gpus"][3]["uuid"]
            await gpus.call("inject", fault="lost", gpu=lost)
            file.write_text(json.dumps(config() | {"drainSeconds": 7}))
            await until(
                lambda: logged(log, "process.cannot_run") or len(all_logged(log, "group.formed")) == 6,
                what="the manager refuses to start, or has six groups",
                timeout=PATIENCE,
            )
            assert [entry["gpus"] for entry in all_logged(log, "group.formed")] == [[0], [1], [2, 3]] * 2
            assert manager.returncode is None


async def test_a_stop_while_it_begins_again_ends_it_with_code_0() -> None:
    with short_folder() as folder:
        env = manager_environment(folder)
        log, file = folder / "manager.log", folder / "config.yaml"
        async with driver(folder):
            for number in range(3):
                file.write_text(json.dumps(config()))
                log.unlink(missing_ok=True)
                async with process("-m", "services.gpu_manager", log=log, **env) as manager:
                    await until_logged(log, "manager.waits")
                    file.write_text(json.dumps(config() | {"drainSeconds": 7}))
                    while logged(log, "config.applied") is None:
                        await asyncio.sleep(0.001)
                    await asyncio.sleep(number * 0.001)  # anywhere between the end of the one and the next
                    manager.send_signal(signal.SIGTERM)
                    assert await asyncio.wait_for(manager.wait(), PATIENCE) == 0


async def test_a_gpu_that_was_missing_at_the_start_makes_its_group_once_the_plugin_has_seen_it() -> None:
    with short_folder() as folder:
        env, log = manager_environment(folder), folder / "manager.log"
        async with driver(folder) as gpus:
            devices = (await gpus.call("devices"))["gpus"]
            await gpus.call("inject", fault="lost", gpu=devices[3]["uuid"])
            async with process("-m", "services.gpu_manager", log=log, **env):
                warning = await until_logged(log, "topology.warning")
                assert "group G23 is not offered: it names GPU 3" in warning["reason"]
                assert [entry["group"] for entry in all_logged(log, "group.formed")] == ["G0", "G1"]
                await until_logged(log, "manager.waits")
                await gpus.call("inject", fault="found", gpu=devices[3]["uuid"])
                seen = FakeGpus(folder / "driver.sock")
                known_gpus.learn(folder / "state", await seen.list(), await seen.links(), await seen.instances())
                await seen.close()
                await until_logged(log, "group.formed", 5)
                assert [entry["gpus"] for entry in all_logged(log, "group.formed")][-1] == [2, 3]


async def test_without_a_gpu_driver_it_says_so_in_one_line() -> None:
    with short_folder() as folder:
        log = folder / "manager.log"
        async with process("-m", "services.gpu_manager", log=log, **manager_environment(folder)) as manager:
            assert await asyncio.wait_for(manager.wait(), PATIENCE) == 1
        refused = logged(log, "process.cannot_run")
        assert "no fake GPU driver at" in refused["reason"]
        assert "Traceback" not in log.read_text()


async def test_a_second_manager_with_the_same_state_folder_names_the_first_and_a_killed_one_leaves_it_free() -> None:
    with short_folder() as folder:
        env, second = manager_environment(folder), folder / "second.log"
        async with driver(folder):
            log = folder / "first.log"
            async with process("-m", "services.gpu_manager", log=log, **env) as first:
                await until_logged(log, "manager.waits")
                other = env | {"KYB_RUN_DIR": str(folder / "other")}
                async with process("-c", IMPATIENT, log=second, **other) as refused:
                    assert await asyncio.wait_for(refused.wait(), PATIENCE) == 1
                assert f"process {first.pid} holds {folder / 'state'}" in second.read_text()
                assert first.returncode is None
                first.kill()
                await first.wait()
            async with process("-c", IMPATIENT, log=second, **other):
                await until_logged(second, "manager.waits")


def manager_environment(folder: Path) -> dict[str, str]:
    env = environment(folder, folder / "device-plugins")
    return env | {"KYB_KUBELET_URL": "http://127.0.0.1:9"}
