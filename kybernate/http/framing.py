"""Bodies of HTTP/1.1 messages: walked by length, by chunk or to the end of the connection, to find their end. Pure."""

import re

LONGEST_LINE = 256
"""Bytes of the line with the size of a chunk, and of a trailer field."""
MOST_TRAILER_BYTES = 8 * 1024
LAST_CHUNK = b"0\r\n\r\n"
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[\w!#$%&'*+.^`|~-]+:[\t\x20-\x7e\x80-\xff]*")
_FIRST = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_SIZE_LINE, _END_LINE, _TRAILER_LINE = "size", "end", "trailer"


class HttpError(Exception):
    """Bytes that are no valid HTTP/1.1 message. ``too_large``: its head, or a line of it, is too long."""

    def __init__(self, text: str, *, too_large: bool = False) -> None:
        super().__init__(text)
        self.too_large = too_large


class Body:
    """Finds the end of a body of known length."""

    __slots__ = ("boundary", "left")
    chunked = False

    def __init__(self, length: int) -> None:
        self.left = length
        self.boundary = True
        """True where a chunk could begin."""

    def walk(self, data: bytes, /) -> int:
        """Take bytes; return where the body ends in them, or -1 if it goes on."""
        left, self.left = self.left, max(0, self.left - len(data))
        return left if left <= len(data) else -1

    def payload(self, data: bytes, end: int, /) -> bytes:
        """Return the part of ``data`` that belongs to the body; ``end`` is what ``walk`` returned."""
        return data if end < 0 else data[:end]


class EndlessBody(Body):
    """A body that ends with its connection."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(0)

    def walk(self, _: bytes, /) -> int:
        """Return -1: it goes on."""
        return -1


class ChunkedBody(Body):
    """Finds the end of a chunked body. Raises HttpError; a trailer is skipped if it may have one."""

    __slots__ = ("_found", "_line", "_phase", "_trailer")
    chunked = True

    def __init__(self, *, trailer: bool = False) -> None:
        super().__init__(0)
        self._line, self._found = b"", b""
        self._phase = _SIZE_LINE
        self._trailer = MOST_TRAILER_BYTES if trailer else 0

    def walk(self, data: bytes, /) -> int:
        """Take bytes; return where the body ends in them, or -1 if it goes on."""
        if self.boundary and (first := _FIRST.match(data)) is not None:
            begin, size = first.end(), int(first[1], 16)
            if size and len(data) == begin + size + 2 and data.endswith(b"\r\n"):
                self._found = data[begin:-2]
                return -1  # exactly one chunk, as most pieces of a stream are
        before = len(self._line)
        if before:
            data, self._line = self._line + data, b""
        at, end, found = 0, len(data), []
        while True:
            if self.left:
                stop = at + self.left
                found.append(data[at:stop])
                if stop > end:
                    self.left = stop - end
                    at = -1
                    break
                at, self.left, self._phase = stop, 0, _END_LINE
            stop = data.find(b"\r\n", at, at + LONGEST_LINE)
            if stop < 0:
                if end - at >= (LONGEST_LINE if self._phase is not _END_LINE else 2):
                    raise HttpError("a line between chunks is too long")
                self._line = data[at:]
                at = -1
                break
            line, at = data[at:stop], stop + 2
            if self._take(line):
                at -= before
                break
        self._found = found[0] if len(found) == 1 else b"".join(found)
        self.boundary = self._phase is _SIZE_LINE and not self._line and not self.left
        return at

    def payload(self, _: bytes, __: int, /) -> bytes:
        """Return what the last ``walk`` found without the sizes."""
        return self._found

    def _take(self, line: bytes) -> bool:
        """Take a line between chunks; return whether the body ends with it."""
        if self._phase is _SIZE_LINE:
            self._size(line)
        elif self._phase is _END_LINE:
            if line:
                raise HttpError("a chunk is longer than its size")
            self._phase = _SIZE_LINE
        else:
            self._trailer -= len(line)
            if line and _TRAILER.fullmatch(line) is None:
                raise HttpError("a line of the trailer is no header field")
            if self._trailer < 0:
                raise HttpError("a trailer that is not served here, or is too long")
            return not line
        return False

    def _size(self, line: bytes) -> None:
        found = _SIZE.fullmatch(line)
        if found is None:
            raise HttpError("an invalid size of a chunk")
        self.left = int(found[1], 16)
        if not self.left:
            self._phase = _TRAILER_LINE


def chunk(data: bytes) -> bytes:
    """Return a chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)
