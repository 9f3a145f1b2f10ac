"""``kyb bus keys``: made once, kept, rotated one by one; as files and as Secrets."""

import base64
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kybernate.bus.credentials import public_key
from kybernate.bus.keys import AUTH_FILE, KeysError, complete, write
from kybernate.bus.rights import Role
from kybernate.dev.nats_server import find_server
from tests.bus.api_server import ApiServer, api_server
from tests.command import Kyb


async def test_a_folder_is_filled_once_and_left_alone(tmp_path: Path, kyb: Kyb) -> None:
    out = tmp_path / "keys"
    code, printed, _ = await kyb("bus", "keys", "--out", str(out))
    assert code == 0
    assert "router.nk" in printed
    first = {file.name: file.read_text() for file in out.iterdir()}
    assert set(first) == {f"{role}.nk" for role in Role} | {"auth.conf"}
    assert oct(out.stat().st_mode & 0o777) == "0o700"
    for role in Role:
        assert oct((out / f"{role}.nk").stat().st_mode & 0o777) == "0o600"
        assert public_key(first[f"{role}.nk"].strip()) in first["auth.conf"]
        assert first[f"{role}.nk"].strip() not in printed
    assert (await kyb("bus", "keys", "--out", str(out)))[:2] == (0, f"{out}: nothing to do, all keys are there\n")
    assert {file.name: file.read_text() for file in out.iterdir()} == first


async def test_one_key_is_rotated_and_the_others_stay(tmp_path: Path, kyb: Kyb) -> None:
    write(tmp_path)
    before = {file.name: file.read_text() for file in tmp_path.iterdir() if file.is_file()}
    assert (await kyb("bus", "keys", "--out", str(tmp_path), "--rotate", "router"))[0] == 0
    after = {file.name: file.read_text() for file in tmp_path.iterdir() if file.is_file()}
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"router.nk", "auth.conf"}
    assert public_key(before["router.nk"].strip()) not in after["auth.conf"]
    assert public_key(after["router.nk"].strip()) in after["auth.conf"]


def test_rights_that_changed_are_written_with_the_same_keys(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "auth.conf").write_text("authorization { older }\n")
    assert write(tmp_path) == ("auth.conf",)


def test_what_is_no_seed_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"router\.nk is not the seed.*--rotate router"):
        complete({"router.nk": "oops"})
    assert "router.nk" in complete({"router.nk": "oops"}, Role.ROUTER)


def test_what_is_no_text_or_no_folder_is_named_with_a_remedy(tmp_path: Path) -> None:
    (seed := tmp_path / "router.nk").write_bytes(b"\xff\xfe")
    with pytest.raises(KeysError, match=r"router\.nk is not the seed.*--rotate router"):
        write(tmp_path)
    with pytest.raises(KeysError, match=r"router\.nk: File exists; name a folder that can be written"):
        write(seed)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("keys",), "name the target"),
        (("keys", "--out", "x", "--secret", "y"), "name the target"),
        (("keys", "--out", "x", "--rotate", "rooter"), "there is no role 'rooter'; there are router"),
        (("keys", "--secret", "y"), "works in a pod only"),
    ],
)
async def test_wrong_usage_is_named(kyb: Kyb, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], why: str) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    code, _, printed = await kyb("bus", *argv)
    assert (code, why in printed) == (2, True), printed


def test_the_server_takes_the_configuration_of_the_docs(pki: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    blocks = [block for block in re.findall(r"```\n(.*?)```", page, re.DOTALL) if "server_name" in block]
    (text,) = [block for block in blocks if f'include "{AUTH_FILE}"' in block]
    write(pki)
    file = pki / "nats.conf"
    file.write_text(text.replace("/data", str(pki / "store")))
    argv = [str(find_server()), "-t", "-c", str(file)]
    tested = subprocess.run(argv, capture_output=True, text=True, cwd=pki, timeout=30, check=False)
    assert tested.returncode == 0, tested.stderr


# --- Secrets ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def api(tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    async with api_server(tmp_path / "api", pki) as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("kybernate.kube.ACCOUNT", server.account)
        yield server


def text_of(api: ApiServer, secret: str) -> dict[str, str]:
    return {key: base64.b64decode(value).decode() for key, value in api.secrets[secret]["data"].items()}


def keys(*more: str) -> tuple[str, ...]:
    return ("bus", "keys", "--secret", "bus-keys", *more)


async def test_a_secret_is_made_once(api: ApiServer, kyb: Kyb) -> None:
    code, printed, why = await kyb(*keys())
    assert (code, why) == (0, "")
    made = text_of(api, "bus-keys")
    assert set(made) == {f"{role}.nk" for role in Role} | {"auth.conf"}
    assert not any(seed.strip() in printed for seed in made.values())
    api.asked.clear()
    code, printed, _ = await kyb(*keys())
    assert printed == "Secret kyb/bus-keys: nothing to do, all keys are there\n"
    assert {line.split()[0] for line in api.asked} == {"GET"}
    assert text_of(api, "bus-keys") == made


async def test_a_secret_is_rotated_and_keeps_what_is_not_ours(api: ApiServer, kyb: Kyb) -> None:
    await kyb(*keys())
    api.secrets["bus-keys"]["data"]["notes"] = base64.b64encode(b"mine").decode()
    before = text_of(api, "bus-keys")
    assert (await kyb(*keys("--rotate", "router")))[0] == 0
    after = text_of(api, "bus-keys")
    assert {key for key in after if after[key] != before[key]} == {"router.nk", "auth.conf"}
    assert after["notes"] == "mine"


async def test_two_that_make_a_secret_at_once_end_with_one_set_of_keys(api: ApiServer, kyb: Kyb, pki: Path) -> None:
    def another() -> None:
        """Between our look and our write the other one wrote."""
        api.between = lambda: None
        theirs = complete({})
        data = {key: base64.b64encode(text.encode()).decode() for key, text in theirs.items()}
        api.secrets["bus-keys"] = {"metadata": {"name": "bus-keys", "resourceVersion": "1"}, "data": data}
        first.update(theirs)

    first: dict[str, str] = {}
    api.between = another
    assert (await kyb(*keys()))[0] == 0
    assert text_of(api, "bus-keys") == first


async def test_a_right_that_the_account_lacks_is_named(api: ApiServer, kyb: Kyb) -> None:
    api.forbidden = {"POST"}
    code, _, printed = await kyb(*keys())
    assert code == 1
    assert "POST /api/v1/namespaces/kyb/secrets: HTTP 403; the service account may not create this" in printed
    assert api.secrets == {}


async def test_an_immutable_secret_is_refused(api: ApiServer, kyb: Kyb) -> None:
    api.secrets["bus-keys"] = {"metadata": {"name": "bus-keys", "resourceVersion": "1"}, "immutable": True}
    code, _, printed = await kyb(*keys())
    assert (code, "Secret bus-keys is immutable: delete it" in printed) == (1, True)
