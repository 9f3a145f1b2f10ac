"""Compile the stub libraries with the system's C compiler, once for each version of their sources."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).resolve().parent
_LIBRARIES = {"libcuda.so.1": "libcuda*.c", "libnvidia-ml.so.1": "libnvidia-ml*.c"}
"""The sources of each, beside wire*.c."""
_FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")
_HIDDEN = "-fvisibility=hidden"
_COMPILE_SECONDS = 120


class StubError(Exception):
    """The stub libraries cannot be built; the text says why and what to do."""


def build_stubs(folder: Path | None = None) -> Path:
    """A folder with ``libcuda.so.1`` and ``libnvidia-ml.so.1`` for ``LD_LIBRARY_PATH``; compiled if it has to be.

    Without ``folder`` the result is kept in ``$XDG_CACHE_HOME/kybernate/stubs-<hash of sources and compiler>``.
    Any number of processes may do this at once. Raises StubError (no compiler, it refuses, the folder is not writable).
    """
    compiler = find_compiler()
    target = folder if folder is not None else _cache() / f"stubs-{_fingerprint(compiler)}"
    if _complete(target) and folder is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".stubs-", dir=target.parent) as work:
            for library, sources in _sources().items():
                _compile(compiler, sources, Path(work) / library)
            target.mkdir(exist_ok=True)
            for library in _sources():  # each rename is atomic, and a second builder writes the same file
                os.replace(Path(work) / library, target / library)
    except OSError as error:
        raise StubError(f"cannot write the stub libraries to {target}: {error}; set XDG_CACHE_HOME") from error
    return target


def find_compiler() -> str:
    """The path of ``$CC``, cc, gcc or clang. Raises StubError when there is none."""
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise StubError(f"no C compiler ({', '.join(names)} not found); install gcc, or set CC to a compiler")


def _sources() -> dict[str, list[Path]]:
    """Libraries and their own sources. Raises StubError if they were not installed."""
    found = {library: sorted(_SOURCES.glob(pattern)) for library, pattern in _LIBRARIES.items()}
    if not all(found.values()):
        raise StubError(f"no C sources in {_SOURCES}; install kybernate from its wheel or its repository")
    return found


def _complete(folder: Path) -> bool:
    return all((folder / library).is_file() for library in _sources())


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kybernate"


def _fingerprint(compiler: str) -> str:
    """Changes with the sources, the flags and the compiler."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    stat = os.stat(compiler)
    built_by = (os.path.realpath(compiler), stat.st_size, stat.st_mtime_ns, os.uname().machine)
    digest.update(repr((_FLAGS, built_by)).encode())
    return digest.hexdigest()[:16]


def _compile(compiler: str, sources: list[Path], library: Path) -> None:
    command = [compiler, *_FLAGS, _HIDDEN, f"-Wl,-soname,{library.name}", "-o", str(library)]
    command += [*map(str, sources), *map(str, sorted(_SOURCES.glob("wire*.c"))), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise StubError(f"{compiler} needs more than {_COMPILE_SECONDS} s for {library.name}; try again") from error
    if done.returncode != 0:
        raise StubError(f"{compiler} refuses {library.name} (exit code {done.returncode}):\n{done.stderr.strip()}")
