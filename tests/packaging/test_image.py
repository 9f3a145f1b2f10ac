"""The image's inputs: pinned, the same as elsewhere, and nothing of the building host."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([a-z0-9._-]+)==(\S+)", re.MULTILINE)
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def pins(name: str) -> dict[str, str]:
    return dict(PIN.findall((ROOT / name).read_text()))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[]", name, maxsplit=1)[0]).lower()


@pytest.mark.parametrize(
    "name", ["requirements/image.txt", "requirements/build.txt", "requirements/llama.txt", "requirements/run.txt"]
)
def test_every_requirement_has_a_version_and_hashes(name: str) -> None:
    text = (ROOT / name).read_text()
    blocks = re.split(r"\n(?=[a-z])", text.strip())
    assert blocks
    for block in blocks:
        assert PIN.match(block), block
        assert "--hash=sha256:" in block, block


def test_the_image_has_the_versions_that_are_tested() -> None:
    everywhere = pins("requirements/all.txt")
    for name in ("requirements/image.txt", "requirements/build.txt", "requirements/llama.txt"):
        other = {one: (version, everywhere[one]) for one, version in pins(name).items() if one in everywhere}
        assert {one: pair for one, pair in other.items() if pair[0] != pair[1]} == {}, "run make lock"


def test_the_image_has_what_the_product_needs_and_nothing_of_development() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    image = set(pins("requirements/image.txt"))
    needed = {normal(one) for one in project["dependencies"]}
    assert needed <= image
    assert not image & {
        "pytest",
        "mypy",
        "ruff",
        "uv",
        "numpy",
        "numba",
        "matplotlib",
        "hypothesis",
        "xllamacpp",
        "gguf",
    }


def test_every_stage_is_built_on_the_given_base() -> None:
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", DOCKERFILE, re.MULTILINE)
    assert [name for _, name in stages] == ["build", "build-dev", "kybernate", "kybernate-dev", ""]
    assert {source for source, _ in stages} == {"${BASE}", "build", "kybernate"}
    assert "ARG BASE=python:3.13-slim-trixie\n" in DOCKERFILE


def test_what_runs_is_not_root() -> None:
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert users == ["65532:65532"]


def test_secrets_of_the_building_host_reach_only_the_stage_that_is_thrown_away() -> None:
    build, _, kept = DOCKERFILE.partition("FROM ${BASE} AS kybernate")
    assert "#secrets COPY build-secrets/" in build
    assert "build-secrets" not in kept
    copied = re.findall(r"^COPY (.*)$", kept, re.MULTILINE)
    assert copied == ["--from=build /opt/kybernate /opt/kybernate", "--from=build-dev /added /"]


def test_the_builder_gets_what_the_dockerfile_copies() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    sent = {line[1:] for line in ignored if line.startswith("!")}
    wanted = {
        path
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for path in line.split()
        if path != "build-secrets/"
    }
    assert sent == wanted | {"Dockerfile"}
    assert all((ROOT / path).exists() for path in wanted)


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_valid_for_a_plain_shell(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True, timeout=10)


def test_what_must_be_root_says_so(tmp_path: Path) -> None:
    """Nothing is downloaded before it is known that it can be used."""
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "DOCKER_HOST": f"unix://{tmp_path}/none.sock",
        "HOME": str(tmp_path),
    }
    for script, arguments in (("base_image.sh", []), ("bare_debian.sh", []), ("with_docker.sh", ["true"])):
        done = subprocess.run(
            ["sh", str(ROOT / "scripts" / script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 1
        assert "as root" in done.stderr


def test_who_gets_docker_gets_docker_compose(tmp_path: Path) -> None:
    """On Debian 12 the second line of README's Install ended with ``unknown flag: --wait``."""
    plugin = tmp_path / "home/.docker/cli-plugins/docker-compose"
    cached = tmp_path / "cache/kybernate/compose/docker-compose"
    cached.parent.mkdir(parents=True)
    cached.write_text("#!/bin/sh\necho Compose v2\n")
    (tmp_path / "docker").write_text(f'#!/bin/sh\n[ "$1" != compose ] || exec {plugin}\n')
    for file in (cached, tmp_path / "docker"):
        file.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    command = ["sh", str(ROOT / "scripts/with_docker.sh"), "docker", "compose", "version"]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "Compose v2\n", "")
