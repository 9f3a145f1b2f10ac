"""Our programs as forks of one process that has imported them: each exec imports for half a CPU second.

A worker of pytest-xdist starts that process, the zygote. From then on ``subprocess.Popen``, and thus asyncio, lets it
fork what ``_Program.of`` takes; everything else is executed. Such a fork is a child of the process that asks
(CLONE_PARENT), with its own pid, command line, environment, folder, session and descriptors 0 to 2, and then does what
``python -m`` or ``-c`` does. The fakes' kubelet and ``kyb up`` start programs too: each is forked with its own zygote.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import inspect
import json
import os
import pkgutil
import platform
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROGRAMS = (
    *("kybernate", "kybernate.dev.up", "tests.quick"),
    *(f"kybernate.dev.fakes.{name}" for name in ("engine", "gpu", "kubelet")),
    *(f"services.{name}" for name in ("checkpointer", "console", "gpu_manager", "plugin", "router", "webhook")),
)
KYB = "from kybernate.cli import main; main()"
READ_AT_ONCE = ("COV", "GRPC_", "LANG", "LC_", "LD_", "PYTHON", "TZ")
"""Beginnings of the names of variables that the loader, the interpreter or an import reads."""

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_FLAGS = 0x8000 | 0x200000 | 0x1000000 | signal.SIGCHLD  # PARENT, CHILD_CLEARTID, CHILD_SETTID
_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP, _PR_GET_TID_ADDRESS = 1, 35, 14, 40
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = _libc.sbrk.restype = ctypes.c_long


@dataclass(frozen=True)
class _Program:
    """What to become."""

    argv: Sequence[str]
    words: Sequence[str]
    """Of ``argv``, those for Python."""
    launch: Sequence[str]
    """Parent and niceness, for what kybernate/dev/fakes/kubelet/launch.py does."""
    env: Mapping[str, str]
    folder: str
    session: bool

    @classmethod
    def of(cls, call: Mapping[str, Any], zygote: Mapping[str, str]) -> "_Program | None":
        """The program of a call of ``Popen._execute_child``; None when it has to be executed, also since its variables
        of READ_AT_ONCE are not those of the zygote."""
        plain = call["close_fds"] and not (
            call["pass_fds"] or call["shell"] or call["executable"] or call["preexec_fn"]
        )
        if not plain or any(os.isatty(fd) for fd in _stdio(call)):
            return None
        env = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if call["env"] is None else call["env"]).items()}
        argv = words = [os.fsdecode(word) for word in call["args"]]
        launch: list[str] = []
        if words[1:3] == ["-I", "-S"] and words[3:] and words[3].endswith("/kubelet/launch.py"):
            launch, words = words[4:6], words[6:]
        python = shutil.which(words[0], path=env.get("PATH"))
        words = words[1:]
        known = words[words[:1] == ["-P"] :][:2] in (*(["-m", name] for name in PROGRAMS), ["-c", KYB])
        if not known or python != sys.executable or _read_at_once(env) != zygote:
            return None
        return cls(argv, words, launch, env, os.path.join(os.getcwd(), call["cwd"] or ""), call["start_new_session"])

    @property
    def starts(self) -> bool:
        """Whether it may start programs."""
        return not {"up", "demo", "kybernate.dev.fakes.kubelet"}.isdisjoint(self.words)

    def become(self, fds: Sequence[int], asked: int) -> None:
        """Change this process into one that was just executed, all but its memory, with ``fds`` as stdio; then answer
        with its pid. Ends it when its parent is gone, or with the error where the folder is missing."""
        asked = os.dup(asked)  # it may be 0
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, (name, mode, buffered) in enumerate((("stdin", "r", -1), ("stdout", "w", -1), ("stderr", "w", 1))):
            old = getattr(sys, name)
            new = open(number, mode, buffered, old.encoding, old.errors, "\n", closefd=False)  # noqa: SIM115
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
        os.environ.clear()
        os.environ.update(self.env)
        try:
            os.chdir(self.folder)
        except OSError as error:
            os.write(asked, f"{os.getpid()} {error.errno}".encode())
            os._exit(127)
        if self.session:
            os.setsid()
        if self.launch:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != int(self.launch[0]):
                os._exit(137)
            os.nice(int(self.launch[1]))
        _show(self.argv if not self.launch else [self.argv[6], *self.words], self.env)
        os.write(asked, f"{os.getpid()} 0".encode())  # not before: who has the pid may signal its group
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))

    def run(self) -> None:
        """What Python does with the words."""
        words = list(self.words)
        sys.orig_argv = [sys.executable, *words]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        if words[0] == "-P":
            del words[0]
        else:
            sys.path.insert(0, self.folder if words[0] == "-m" else "")
        sys.argv = [words[0], *words[2:]]
        if words[0] == "-m":
            runpy._run_module_as_main(words[1])
        else:
            exec(words[1], main.__dict__)


def install() -> None:
    """From now on this process lets a zygote fork its programs, where the machine can."""
    if _CLONE is None or _read_at_once(os.environ).keys() & {"COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"}:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    actions = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)]
    os.posix_spawn(sys.executable, [sys.executable, "-P", __file__], os.environ, file_actions=actions)
    theirs.close()
    _let(ours)


def _let(zygote: socket.socket) -> None:
    execute, lock = subprocess.Popen._execute_child, threading.Lock()
    signature, read = inspect.signature(execute), _read_at_once(os.environ)

    def forked(self: Any, *given: Any) -> None:
        call = signature.bind(self, *given).arguments
        program = _Program.of(call, read)
        if program is None:
            execute(self, *given)
            return
        with lock:
            socket.send_fds(zygote, [json.dumps(asdict(program)).encode()], _stdio(call))
            pid, error = map(int, zygote.recv(100).split())
        if error:
            if pid:
                os.waitpid(pid, 0)
            raise OSError(error, os.strerror(error), program.folder)
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*(call[f"{name}{end}"] for name in ("p2c", "c2p", "err") for end in ("read", "write")))

    subprocess.Popen._execute_child = forked


def _stdio(call: Mapping[str, Any]) -> list[int]:
    given = (call["p2cread"], call["c2pwrite"], call["errwrite"])
    return [number if fd == -1 else fd for number, fd in enumerate(given)]


def _read_at_once(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_ONCE)}


# --- the zygote -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Import once, fork for each request, and run the program in the fork."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the tests
    program = _serve(socket.socket(fileno=0))
    while program.starts:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            _let(ours)
            break
        ours.close()
        with open(os.devnull, "r+b") as null:
            for number in range(3):
                os.dup2(null.fileno(), number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        program = _serve(theirs)
    _run(program)


def _run(program: _Program) -> None:
    """Run it and end, without the clearing of the heap, which would copy all that is shared."""
    code: Any = None
    try:
        program.run()
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            raise
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # a full disk, say: of that the interpreter's own end tells
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


def _serve(requests: socket.socket) -> _Program:
    """Returns in each fork; the zygote ends with the process that asks."""
    while True:
        text, fds, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not text:
            os._exit(0)
        _import_all()
        pid = _fork()
        if pid == 0:
            program = _Program(**json.loads(text))
            program.become(fds, requests.detach())
            return program
        for fd in fds:
            os.close(fd)
        if pid < 0:
            requests.send(f"0 {errno.EAGAIN}".encode())


def _import_all() -> None:
    if "services" in sys.modules:
        return
    gc.disable()
    for name in PROGRAMS:
        program = f"{name}.__main__" if hasattr(importlib.import_module(name), "__path__") else name
        importlib.import_module(program)
        del sys.modules[program]  # -m warns of one that was imported before
    for folder in ("kybernate.cli", "kybernate.doctor"):
        for module in pkgutil.iter_modules(sys.modules[folder].__path__):
            importlib.import_module(f"{folder}.{module.name}")
    gc.collect()
    gc.freeze()
    gc.enable()


def _fork() -> int:
    """As os.fork, but the new process is a sibling."""
    thread_id = ctypes.c_ulong()
    _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(thread_id), 0, 0, 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc.syscall(*map(ctypes.c_long, (_CLONE, _CLONE_FLAGS, 0, 0, thread_id.value, thread_id.value)))
    (ctypes.pythonapi.PyOS_AfterFork_Parent if pid else ctypes.pythonapi.PyOS_AfterFork_Child)()
    return pid


def _show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Show these in /proc/self/cmdline and environ."""
    command = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    _show.text = ctypes.create_string_buffer(command + variables)  # lives as long as this process
    at = ctypes.addressof(_show.text)
    stat = [0, *map(int, Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()[1:])]
    code, stack, data = stat[23:25], stat[25], stat[42:45]  # fields 26 to 28 and 45 to 47 of proc(5)
    shown = (at, at + len(command), at + len(command), at + len(command) + len(variables))
    layout = (ctypes.c_ulong * 13)(*code, *data, _libc.sbrk(0), stack, *shown, 0, 0xFFFFFFFF << 32)
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.c_long(ctypes.sizeof(layout)), 0)


if __name__ == "__main__":
    main()
