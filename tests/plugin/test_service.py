"""The plugin as the process that runs on a node, against the fakes as processes."""

import asyncio
import json
import signal

from kybernate.bus.nats import NatsBus
from kybernate.dev.nats_server import NatsServer
from kybernate.messages import SeatAllocated
from tests.kubelet.stand import pod, running_kubelet, short_folder, until_capacity
from tests.plugin.processes import driver, environment, logged, process, readyz
from tests.plugin.stand import ONE, TWO, until_ready
from tests.until import until


async def test_without_nats_it_waits_for_the_driver_then_offers_its_seats_and_exits_cleanly() -> None:
    async with running_kubelet() as kubelet:
        with short_folder() as folder:
            log = folder / "plugin.log"
            env = environment(folder, kubelet.options.folder)
            async with process("-m", "services.plugin", log=log, **env) as plugin:
                serving = await until(
                    lambda: logged(log, "plugin.serving"), what="the log event plugin.serving", timeout=20
                )
                status, body = await readyz(serving["url"])
                assert (status, list(body["unmet"])) == (503, ["gpus"])
                driver = ("-m", "kybernate.dev.fakes.gpu", "--socket", str(folder / "driver.sock"), "--gpus", "4")
                async with process(*driver, log=folder / "driver.log"):
                    await until_ready(kubelet, timeout=20)
                    while (await readyz(serving["url"]))[0] != 200:
                        await asyncio.sleep(0.02)
                    created = kubelet.create(pod(resource=TWO))
                    call = await until(
                        lambda: list((folder / "run" / "seats").glob("2x-*/call.json")),
                        what="a start of a 2x seat waits at the gate",
                    )
                    assert created.phase == "Pending"
                    plugin.send_signal(signal.SIGTERM)
                    assert await asyncio.wait_for(plugin.wait(), 2.5) == 0
                    assert not call[0].exists()
                    assert list(kubelet.options.folder.glob("kyb-*.sock")) == []
                    assert "Traceback" not in log.read_text()


async def test_it_offers_no_seat_before_the_manager_has_a_ledger() -> None:
    """A manager that finds allocated seats and no ledger takes it for lost, and waits for tickets that were lost."""
    async with running_kubelet() as kubelet:
        with short_folder() as folder:
            log, env = folder / "plugin.log", environment(folder, kubelet.options.folder)
            ledger = folder / "state" / "ledger"
            ledger.rename(ledger.with_suffix(".later"))
            async with driver(folder), process("-m", "services.plugin", log=log, **env):
                serving = await until(
                    lambda: logged(log, "plugin.serving"), what="the log event plugin.serving", timeout=20
                )
                while (unmet := (await readyz(serving["url"]))[1]["unmet"]).keys() != {"manager"}:
                    await asyncio.sleep(0.02)
                assert str(ledger) in unmet["manager"]
                assert kubelet.devices.capacity() == {}

                ledger.with_suffix(".later").rename(ledger)
                await until_ready(kubelet, timeout=20)
                while (await readyz(serving["url"]))[0] != 200:
                    await asyncio.sleep(0.02)


async def test_the_successor_of_a_killed_plugin_deletes_its_calls() -> None:
    async with running_kubelet() as kubelet:
        with short_folder() as folder:
            env = environment(folder, kubelet.options.folder)
            driver = ("-m", "kybernate.dev.fakes.gpu", "--socket", str(folder / "driver.sock"), "--gpus", "4")
            async with process(*driver, log=folder / "driver.log"):
                async with process("-m", "services.plugin", log=folder / "one.log", **env) as first:
                    await until_ready(kubelet, timeout=20)
                    kubelet.create(pod())
                    (call,) = await until(
                        lambda: list((folder / "run" / "seats").glob("1x-*/call.json")),
                        what="a start of a 1x seat waits at the gate",
                    )
                    old = json.loads(call.read_text())["call"]
                    first.kill()
                    await first.wait()
                await until_capacity(kubelet, {ONE: (4, 0), TWO: (2, 0)})
                async with process("-m", "services.plugin", log=folder / "two.log", **env):
                    await until_ready(kubelet, timeout=20)
                    await until(
                        lambda: call.exists() and json.loads(call.read_text())["call"] != old,
                        what="another start of the seat waits at the gate",
                    )
                    assert len(list(kubelet.options.folder.glob("kyb-*.sock"))) == 2


async def test_with_nats_it_publishes_its_allocations() -> None:
    async with running_kubelet() as kubelet:
        with short_folder() as folder:
            async with (
                NatsServer(folder / "nats") as server,
                NatsBus(server.url, source="test", name="test").opened() as bus,
            ):
                await bus.until_connected()
                async with bus.subscribe(SeatAllocated.pattern()) as messages:
                    env = environment(folder, kubelet.options.folder, KYB_NATS_URL=server.url)
                    driver = ("-m", "kybernate.dev.fakes.gpu", "--socket", str(folder / "driver.sock"), "--gpus", "4")
                    async with (
                        process(*driver, log=folder / "driver.log"),
                        process("-m", "services.plugin", log=folder / "plugin.log", **env),
                    ):
                        await until_ready(kubelet, timeout=20)
                        kubelet.create(pod())
                        message = await asyncio.wait_for(anext(messages), 10)
                        assert isinstance(message, SeatAllocated)
                        assert (message.node, message.group) == ("node-0", "G0")
                        assert message.seat.startswith("1x-")


async def test_an_invalid_configuration_ends_it_with_one_message() -> None:
    with short_folder() as folder:
        env = environment(folder, folder / "device-plugins")
        (folder / "config.yaml").write_text("profiles: []")
        async with process("-m", "services.plugin", log=folder / "log", **env) as plugin:
            assert await asyncio.wait_for(plugin.wait(), 20) == 2
        assert (folder / "log").read_text().startswith("kyb-plugin: ")
        assert "config.yaml" in (folder / "log").read_text()


async def test_an_unknown_setting_ends_it() -> None:
    with short_folder() as folder:
        env = environment(folder, folder / "device-plugins", KYB_NEIGHBOUR="ignore")
        async with process("-m", "services.plugin", log=folder / "log", **env) as plugin:
            assert await asyncio.wait_for(plugin.wait(), 20) == 2
        assert "did you mean KYB_NEIGHBOURS?" in (folder / "log").read_text()
