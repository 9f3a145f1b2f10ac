"""Compiling the stub libraries, and what they export."""

import ctypes
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kybernate.dev.fakes.stubs import StubError, build_stubs

SOURCES = Path(build_stubs.__code__.co_filename).parent
LIBRARIES = {"libcuda.so.1", "libnvidia-ml.so.1"}


def test_it_is_compiled_once_and_found_again(compiler, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = build_stubs()
    assert folder.parent == tmp_path / "kybernate"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert set(before) == LIBRARIES
    assert build_stubs() == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_two_who_compile_at_once_do_not_disturb_each_other(compiler, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        folders = {one.result() for one in [pool.submit(build_stubs) for _ in range(2)]}
    (folder,) = folders
    assert {path.name for path in folder.iterdir()} == LIBRARIES
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing is left over"


def test_a_folder_can_be_named(compiler, tmp_path: Path):
    assert build_stubs(tmp_path / "here") == tmp_path / "here"
    assert {path.name for path in (tmp_path / "here").iterdir()} == LIBRARIES


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(StubError, match=r"no C compiler \(cc, gcc, clang not found\); install gcc"):
        build_stubs()


def test_a_compiler_that_refuses_is_quoted(monkeypatch, tmp_path: Path):
    refusing = tmp_path / "cc"
    refusing.write_text("#!/bin/sh\necho 'libcuda.c:1: no' >&2\nexit 4\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("CC", str(refusing))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(StubError, match=r"refuses libcuda\.so\.1 \(exit code 4\):\nlibcuda\.c:1: no"):
        build_stubs()
    assert list((tmp_path / "kybernate").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(compiler, monkeypatch, tmp_path: Path):
    occupied = tmp_path / "cache"
    occupied.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    with pytest.raises(StubError, match="set XDG_CACHE_HOME"):
        build_stubs()


def test_the_libraries_export_nothing_but_the_api(stubs: Path):
    """Otherwise two libraries in one process would get into each other's way."""
    tool = shutil.which("nm")
    if tool is None:
        pytest.skip("nm is not installed")
    for library, prefix in (("libcuda.so.1", "cu"), ("libnvidia-ml.so.1", "nvml")):
        listed = subprocess.run(
            [tool, "-D", "--defined-only", stubs / library], capture_output=True, text=True, check=True
        )
        names = [line.split()[-1] for line in listed.stdout.splitlines()]
        assert names
        assert [name for name in names if not re.match(rf"{prefix}[A-Z]|{prefix}Init", name)] == []


def test_every_function_is_found_by_name_and_those_of_another_version_are_not(stubs: Path):
    """cuGetProcAddress: the form that a program of that CUDA version means."""
    library = ctypes.CDLL(str(stubs / "libcuda.so.1"))

    def address(name: str, version: int) -> int | None:
        found, status = ctypes.c_void_p(), ctypes.c_int(-1)
        arguments = (name.encode(), ctypes.byref(found), version, ctypes.c_uint64(0), ctypes.byref(status))
        assert library.cuGetProcAddress_v2(*arguments) == 0
        assert status.value == (0 if found.value else 1)
        return found.value

    def own(symbol: str) -> int | None:
        return ctypes.cast(library[symbol], ctypes.c_void_p).value

    assert address("cuInit", 2000) == own("cuInit")
    assert address("cuMemAlloc", 3020) == own("cuMemAlloc_v2")
    assert address("cuDeviceGetUuid", 9020) == own("cuDeviceGetUuid")
    assert address("cuDeviceGetUuid", 11040) == own("cuDeviceGetUuid_v2")
    assert address("cuCtxCreate", 12050) == own("cuCtxCreate_v4")
    assert address("cuCtxCreate", 11040) is None, "a form that this library does not have"
    assert address("cuLaunchKernel", 12000) is None
    assert address("printf", 12000) is None
    for call in ("Lock", "Checkpoint", "Restore", "Unlock", "GetState", "GetRestoreThreadId"):
        assert address(f"cuCheckpointProcess{call}", 12080) == own(f"cuCheckpointProcess{call}"), "what C programs link"
