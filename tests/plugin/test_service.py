"""The plugin as the process that runs on a node, against the fakes as processes."""

import asyncio
import signal

import pytest

from tests.kubelet.stand import pod, short_folder
from tests.plugin.processes import driver, environment, machine, process, readyz, until_readyz, until_started
from tests.plugin.stand import TWO, until_ready


async def test_without_nats_it_waits_for_the_driver_then_offers_its_seats_and_exits_cleanly() -> None:
    async with machine() as (kubelet, folder):
        log, env = folder / "plugin.log", environment(folder, kubelet.options.folder)
        async with process("-m", "services.plugin", log=log, **env) as plugin:
            status, body = await readyz(log)
            assert (status, list(body["unmet"])) == (503, ["gpus"])
            async with driver(folder):
                await until_ready(kubelet, timeout=20)
                await until_readyz(log)
                created = kubelet.create(pod(resource=TWO))
                call = await until_started(folder, "2x")
                assert created.phase == "Pending"
                plugin.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(plugin.wait(), 2.5) == 0
                assert not call.exists()
                assert list(kubelet.options.folder.glob("kyb-*.sock")) == []
                assert "Traceback" not in log.read_text()


async def test_it_offers_no_seat_before_the_manager_has_a_ledger() -> None:
    """A manager that finds allocated seats and no ledger takes it for lost, and waits for tickets that were lost."""
    async with machine() as (kubelet, folder):
        log, env = folder / "plugin.log", environment(folder, kubelet.options.folder)
        ledger = folder / "state" / "ledger"
        ledger.rename(ledger.with_suffix(".later"))
        async with driver(folder), process("-m", "services.plugin", log=log, **env):
            while (unmet := (await readyz(log))[1]["unmet"]).keys() != {"manager"}:
                await asyncio.sleep(0.02)
            assert str(ledger) in unmet["manager"]
            assert kubelet.devices.capacity() == {}

            ledger.with_suffix(".later").rename(ledger)
            await until_ready(kubelet, timeout=20)
            await until_readyz(log)


@pytest.mark.parametrize(
    ("config", "more", "says"),
    [
        ("profiles: []", {}, "config.yaml"),
        (None, {"KYB_NEIGHBOUR": "ignore"}, "did you mean KYB_NEIGHBOURS?"),
    ],
    ids=["configuration", "setting"],
)
async def test_what_is_invalid_ends_it_with_one_message(config: str | None, more: dict[str, str], says: str) -> None:
    with short_folder() as folder:
        env = environment(folder, folder / "device-plugins", **more)
        if config is not None:
            (folder / "config.yaml").write_text(config)
        async with process("-m", "services.plugin", log=folder / "log", **env) as plugin:
            assert await asyncio.wait_for(plugin.wait(), 20) == 2
        text = (folder / "log").read_text()
        assert (text.startswith("kyb-plugin: "), says in text) == (True, True), text
