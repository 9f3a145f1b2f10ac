"""How the stub libraries read the daemon's JSON, compared with Python's own reading."""

import ctypes
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stubs.test_build import SOURCES

NAMES = st.text('ab"\\,:{}[] ', max_size=5)
SCALARS = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.text('xy"\\/\n\t,:{}[] ', max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)
NOTHING = -77


class Wire:
    """The wire protocol as a separate library."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name in ("kyb_member", "kyb_element"):
            getattr(self.library, name).restype = ctypes.c_void_p
        self.library.kyb_number.restype = ctypes.c_longlong

    def read(self, at: int | None, like: Any) -> Any:
        """What is at an address, guided by the value that should be there."""
        lib, address = self.library, ctypes.c_void_p(at)
        if isinstance(like, dict):
            return {key: self.read(lib.kyb_member(address, self._quoted(key)), value) for key, value in like.items()}
        if isinstance(like, list):
            count = lib.kyb_count(address)
            assert lib.kyb_element(address, count) is None
            return [self.read(lib.kyb_element(address, index), like[index]) for index in range(count)]
        if isinstance(like, str):
            out = ctypes.create_string_buffer(200)
            return out.value.decode() if lib.kyb_string(address, out, 200) == 0 else None
        number = lib.kyb_number(address, ctypes.c_longlong(NOTHING))
        return None if number == NOTHING else bool(number) if isinstance(like, bool) else number

    def _quoted(self, key: str) -> bytes:
        """Members are looked for as they are written; the daemon's names need no escapes."""
        return json.dumps(key)[1:-1].encode()


@pytest.fixture(scope="module")
def wire(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Wire:
    library = tmp_path_factory.mktemp("wire") / "wire.so"
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler, *flags, "-o", library, *SOURCES.glob("wire*.c")], check=True)
    return Wire(library)


@given(value=st.dictionaries(NAMES, VALUES, max_size=5))
def test_whatever_python_writes_is_read_the_same(wire: Wire, value: dict[str, Any]):
    text = ctypes.create_string_buffer(json.dumps(value).encode())
    assert wire.read(ctypes.addressof(text), value) == value


@given(data=st.binary(max_size=60), key=st.sampled_from(["a", "code", ""]))
def test_what_is_no_json_is_read_as_nothing_and_never_beyond_its_end(wire: Wire, data: bytes, key: str):
    text = ctypes.create_string_buffer(b"{" + data)
    out = ctypes.create_string_buffer(8)
    wire.library.kyb_text(text, key.encode(), out, 8)
    wire.library.kyb_int(text, key.encode(), ctypes.c_longlong(0))
    wire.library.kyb_count(text)


def test_a_member_that_is_not_there_is_what_the_caller_wants(wire: Wire):
    wire.library.kyb_int.restype = ctypes.c_longlong
    assert wire.library.kyb_int(b'{"code": 5}', b"cod", ctypes.c_longlong(-1)) == -1
    assert wire.library.kyb_int(b'{"a": {"code": 5}}', b"code", ctypes.c_longlong(-1)) == -1, "not of an inner object"
    assert wire.library.kyb_int(b'{"code": "5"}', b"code", ctypes.c_longlong(-1)) == -1


def test_texts_are_quoted_and_cut(wire: Wire):
    out = ctypes.create_string_buffer(b"x", 16)
    assert wire.library.kyb_quote(out, 16, b'a"b\\c\n') == 0
    assert out.value == b'x"a\\"b\\\\c "'
    assert wire.library.kyb_quote(out, 16, b"much too long for it") == -1
    short = ctypes.create_string_buffer(3)
    assert wire.library.kyb_text(b'{"name": "long"}', b"name", short, 3) == 0
    assert short.value == b"lo"
