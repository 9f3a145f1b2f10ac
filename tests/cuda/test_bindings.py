"""What the driver gets through ctypes, and what comes back: bytes that go in, numbers that come out."""

import json
from pathlib import Path

import pytest

from kybernate.cuda import CudaResult, CudaState
from tests.cuda.recorder import Recorder

PRELUDE = """
import json, sys
from kybernate.cuda.ctypes_api import CheckpointApi
cuda = CheckpointApi()
"""
OLD, NEW = bytes(range(16)), bytes(range(200, 216))
ZEROS = "00" * 64


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder.build(tmp_path / "lib")


def parsed(output: str) -> list[object]:
    """The JSON that the program printed last; the library prints as well."""
    return json.loads(output.splitlines()[-1])


def test_the_structs_have_64_bytes_and_what_is_reserved_is_zero(recorder: Recorder) -> None:
    recorder.python(
        PRELUDE + "cuda.init(); cuda.lock(7, 0x01020304); cuda.lock(7); cuda.checkpoint(7); cuda.restore(7)\n"
        "cuda.unlock(7)",
    )
    assert recorder.calls("cuCheckpointProcessLock") == ["04030201" + "00" * 60, ZEROS]
    assert recorder.calls("cuCheckpointProcessCheckpoint")[0] in ("NULL", ZEROS)
    assert recorder.calls("cuCheckpointProcessRestore")[0] in ("NULL", ZEROS[:112])
    assert recorder.calls("cuCheckpointProcessUnlock")[0] in ("NULL", ZEROS)


def test_a_map_is_an_array_of_pairs_of_uuids(recorder: Recorder) -> None:
    recorder.python(
        PRELUDE + "old, new = (bytes.fromhex(text) for text in sys.argv[1:])\n"
        "cuda.init(); cuda.restore(7, [(old, new), (new, old)])",
        OLD.hex(),
        NEW.hex(),
    )
    assert recorder.calls("pairs") == [(OLD + NEW + NEW + OLD).hex()]
    assert recorder.calls("cuCheckpointProcessRestore") == ["02000000" + "00" * 52]


def test_every_result_comes_back_as_its_number_even_one_that_is_newer_than_the_binding(recorder: Recorder) -> None:
    codes = [*(int(code) for code in CudaResult), 12345]
    output = recorder.python(
        PRELUDE
        + """
import os
from pathlib import Path
found = []
for code in json.loads(sys.argv[1]):
    names = ("Lock", "Checkpoint", "Restore", "Unlock", "GetState", "GetRestoreThreadId")
    lines = [f"cuInit {code}\\n", *(f"cuCheckpointProcess{name} {code} 3\\n" for name in names)]
    Path(os.environ["RECORDER_FOLDER"], "results").write_text("".join(lines))
    found.append([cuda.init(), cuda.lock(7), cuda.checkpoint(7), cuda.restore(7), cuda.unlock(7)])
    found[-1] += [*cuda.state(7), *cuda.restore_tid(7)]
print()
print(json.dumps(found))
""",
        json.dumps(codes),
    )
    for code, found in zip(codes, parsed(output), strict=True):
        value = 3 if code == 0 else -1
        assert found == [code] * 5 + [code, value, code, value]


def test_every_state_comes_back_as_its_number_even_one_that_is_newer_than_the_binding(recorder: Recorder) -> None:
    output = recorder.python(
        PRELUDE
        + """
import os
from pathlib import Path
found = []
for state in json.loads(sys.argv[1]):
    Path(os.environ["RECORDER_FOLDER"], "results").write_text(f"cuCheckpointProcessGetState 0 {state}")
    found.append(cuda.state(7))
print(json.dumps(found))
""",
        json.dumps([*(int(state) for state in CudaState), 9]),
    )
    assert parsed(output) == [[0, state] for state in (0, 1, 2, 3, 4, 5, 9)]


def test_others_run_while_a_call_blocks(recorder: Recorder) -> None:
    recorder.answer(cuCheckpointProcessLock="wait")
    output = recorder.python(
        PRELUDE
        + """
import os, threading, time
from pathlib import Path
folder, codes = Path(os.environ["RECORDER_FOLDER"]), []
(folder / "calls").touch()
thread = threading.Thread(target=lambda: codes.append(cuda.lock(7)))
thread.start()
while "Lock" not in (folder / "calls").read_text():  # never reached if the call keeps the GIL
    time.sleep(0.001)
(folder / "go").touch()
thread.join()
print(json.dumps(codes))
""",
    )
    assert parsed(output) == [0]


def test_importing_the_package_loads_no_binding(recorder: Recorder) -> None:
    output = recorder.python(
        "import json, sys; import kybernate.cuda; print(json.dumps([m in sys.modules for m in ('ctypes', 'cuda')]))"
    )
    assert parsed(output) == [False, False]
