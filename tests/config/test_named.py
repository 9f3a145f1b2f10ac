"""One of several configurations of a folder, by the node's label."""

from pathlib import Path

import pytest
from aiohttp import web

from kybernate.config import ConfigError, load, load_all, names
from kybernate.dev.fakes.gpu.spec import hardware
from kybernate.http.server import HttpServer
from kybernate.kube import Kube
from kybernate.node import config as node_config
from kybernate.topology import plan
from tests.config.files import write

PLAIN = "profiles:\n  - {name: one, resource: kyb.ai/one, groupSize: 1, seatsPerGroup: 4}\n"
A100 = """\
policy: {name: quantum, settings: {quantumSeconds: 7}}
profiles:
  - name: two
    resource: kyb.ai/two
    groupSize: 2
    seatsPerGroup: 3
"""


def two(folder: Path, a100: str = A100) -> Path:
    """A folder with two configurations."""
    made = folder / "configs"
    made.mkdir(exist_ok=True)
    write(made, PLAIN, "default.yaml")
    write(made, a100, "a100.yaml")
    return made


def test_a_node_gets_the_configuration_that_it_names(tmp_path: Path) -> None:
    path = two(tmp_path)
    config = load(path, "a100")
    assert (config.resources, config.chosen, config.note) == (("kyb.ai/two",), "a100", "")
    assert config.policy.settings == {"quantum_seconds": 7.0}
    assert names(path) == ("a100", "default")
    assert list(load_all(path)) == ["a100", "default"]


@pytest.mark.parametrize("name", [None, ""])
def test_a_node_that_names_none_gets_the_default_and_a_note_says_so(tmp_path: Path, name: str | None) -> None:
    config = load(two(tmp_path), name)
    assert (config.resources, config.chosen) == (("kyb.ai/one",), "default")
    assert config.note == "this node names no configuration, so it gets default; kyb.ai/config could name a100"


def test_a_plain_file_is_the_default_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN)
    assert load(path) == load(path, "default")
    assert (load(path).chosen, load(path).note, names(path)) == ("default", "", ("default",))


def test_a_folder_has_one_configuration_per_file(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: the files are links through a hidden folder that is swapped in one step."""
    data = tmp_path / "..2026_01_01"
    data.mkdir()
    write(data, PLAIN, "default.yaml")
    write(data, PLAIN.replace("one", "a"), "a100.yaml")
    (tmp_path / "..data").symlink_to(data.name)
    for name in ("default.yaml", "a100.yaml"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    write(tmp_path, "read me", "notes.txt")
    assert names(tmp_path) == ("a100", "default")
    assert load(tmp_path, "a100").resources == ("kyb.ai/a",)
    assert load(tmp_path).resources == ("kyb.ai/one",)


def test_a_mistake_in_another_nodes_configuration_does_not_stop_this_one(tmp_path: Path) -> None:
    path = two(tmp_path, A100.replace("groupSize: 2", "groupSize: 0"))
    assert load(path).resources == ("kyb.ai/one",)
    expected = r"a100\.yaml:5: profiles\[0\]\.groupSize: 0: is out of range; it must be at least 1"
    for read in (lambda: load(path, "a100"), lambda: load_all(path)):
        with pytest.raises(ConfigError, match=expected):
            read()


def test_errors_about_the_machine_and_the_policy_name_the_place_too(tmp_path: Path) -> None:
    path = two(tmp_path, A100.replace("groupSize: 2", "groupSize: 9"))
    with pytest.raises(ConfigError, match=r"a100\.yaml:5: profiles\[0\]\.groupSize: 9: this machine has only"):
        plan(load(path, "a100"), *hardware("8xL40S"))
    path = two(tmp_path, A100.replace("quantumSec", "quantumSek"))
    with pytest.raises(ConfigError, match=r"a100\.yaml:1: policy\.settings\.quantumSekonds: unknown key; did you mean"):
        load(path, "a100")


def test_wrong_names_are_errors_with_the_known_ones(tmp_path: Path) -> None:
    folder, plain = two(tmp_path), write(tmp_path, PLAIN)
    with pytest.raises(ConfigError, match=r"no configuration 'h100'; did you mean a100\? \(it has a100, default\)"):
        load(folder, "h100")
    with pytest.raises(ConfigError, match=r"no configuration 'a100'; known are default \(it has default\)"):
        load(plain, "a100")
    (folder / "default.yaml").rename(folder / "other.yaml")
    with pytest.raises(ConfigError, match="has no configuration 'default' for nodes that name none; set the node"):
        load(folder)


def test_several_configurations_in_one_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":1: configs: unknown key; write each to NAME\.yaml of a folder"):
        load(write(tmp_path, "configs:\n  default: {}\n"))


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, PLAIN, "default.yaml")
    write(tmp_path, PLAIN, "default.yml")
    with pytest.raises(ConfigError, match=r"default\.yml: a second configuration called default; rename one of them"):
        load(tmp_path)


@pytest.mark.parametrize(("labels", "resource"), [({"kyb.ai/config": "a100"}, "kyb.ai/two"), ({}, "kyb.ai/one")])
async def test_the_nodes_label_decides_and_an_absent_api_server_is_waited_for(
    tmp_path: Path, labels: dict[str, str], resource: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess would give this node the groups of another."""
    monkeypatch.setattr(node_config, "RETRY_SECONDS", 0.01)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    asked = []

    async def node(request: web.Request) -> web.Response:
        asked.append(request.match_info["name"])
        if len(asked) < 3:
            return web.Response(status=503)
        return web.json_response({"metadata": {"name": "n1", "labels": labels}})

    (tmp_path / "account").mkdir()
    write(tmp_path / "account", "secret", "token")
    app = web.Application()
    app.add_routes([web.get("/api/v1/nodes/{name}", node)])
    async with HttpServer(app, "127.0.0.1", 0) as server:
        kube = Kube(server.url, tmp_path / "account")
        try:
            config = await node_config.load_now(two(tmp_path), "n1", kube)
        finally:
            await kube.close()
    assert config.resources == (resource,)
    assert asked == ["n1"] * 3
