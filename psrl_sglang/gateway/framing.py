"""Where an HTTP/1.1 reply begins and ends in the bytes of a connection (RFC 9112). Nothing here waits or reads."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_HEAD_BYTES = 64 << 10
_MAX_LINE_BYTES = 8 << 10
_LINE = b"\r\n"
_HEAD_END = b"\r\n\r\n"


class BadReply(Exception):
    """It is no HTTP, or none that is read here; the text says what it is instead."""


@dataclass(frozen=True, slots=True)
class Head:
    """``length`` is None where the body is in chunks or ends with the connection."""

    status: int
    headers: list[tuple[str, str]]
    content_type: str
    length: int | None
    is_chunked: bool
    keeps_alive: bool


def read_head(buffer: bytes) -> tuple[Head, bytes] | None:
    """The head of a reply and what follows it, or None while it is not whole. Raises `BadReply`."""
    end = buffer.find(_HEAD_END)
    if end < 0:
        if len(buffer) > _MAX_HEAD_BYTES:
            raise BadReply(f"a head of more than {_MAX_HEAD_BYTES} bytes")
        if not b"HTTP/1.".startswith(buffer[:7]):
            raise BadReply(f"no HTTP: {buffer[:40]!r}")
        return None
    first, *lines = buffer[:end].split(_LINE)
    status, keeps_alive = _status(first)
    headers: list[tuple[str, str]] = []
    content_type, length, is_chunked = "", None, False
    for line in lines:
        name, colon, value = line.decode("utf-8", "surrogateescape").partition(":")
        if not colon or not name or name[0] in " \t":
            raise BadReply(f"no header: {line[:40]!r}")
        value = value.strip(" \t")
        headers.append((name, value))
        match name.lower():
            case "content-type":
                content_type = value
            case "content-length":
                length = _length(value, length)
            case "transfer-encoding":
                if value.lower() != "chunked":
                    raise BadReply(f"transfer-encoding {value!r}")
                is_chunked = True
            case "connection":
                keeps_alive = "keep-alive" in value.lower() or (keeps_alive and "close" not in value.lower())
    if status in (204, 304):
        length, is_chunked = 0, False
    if is_chunked:
        length = None
    return Head(status, headers, content_type, length, is_chunked, keeps_alive), buffer[end + len(_HEAD_END) :]


def _status(line: bytes) -> tuple[int, bool]:
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not code.isdigit() or len(code) != 3:
        raise BadReply(f"no HTTP: {line[:40]!r}")
    return int(code), version == b"HTTP/1.1"


def _length(value: str, before: int | None) -> int:
    if not (value.isascii() and value.isdigit()) or (before is not None and before != int(value)):
        raise BadReply(f"content-length {value!r}")
    return int(value)


class Chunks:
    """Takes chunked bytes apart. ``is_complete`` once the last chunk and what follows it are there."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0  # of the chunk under way, with the line end behind it
        self._in_trailer = False
        self.is_complete = False

    @property
    def has_more(self) -> bool:
        """Whether bytes came behind the end."""
        return self.is_complete and bool(self._buffer)

    def take(self, data: bytes) -> bytes:
        """The content in the next bytes. Raises `BadReply`."""
        content: list[bytes] = []
        buffer = self._buffer + data if self._buffer else data
        at = 0
        while not self.is_complete:
            if self._left:
                piece = buffer[at : at + self._left]
                if not piece:
                    break
                content.append(piece[: max(0, self._left - len(_LINE))])
                self._left -= len(piece)
                at += len(piece)
                continue
            end = buffer.find(_LINE, at)
            if end < 0:
                if len(buffer) - at > _MAX_LINE_BYTES:
                    raise BadReply("a chunk without a size")
                break
            line, at = buffer[at:end], end + len(_LINE)
            self._take_line(line)
        self._buffer = buffer[at:]
        return b"".join(content) if len(content) != 1 else content[0]

    def _take_line(self, line: bytes) -> None:
        if self._in_trailer:
            self.is_complete = not line
            return
        digits = line.partition(b";")[0].strip()
        try:
            size = int(digits, 16)
        except ValueError as error:
            raise BadReply(f"a chunk of size {line[:20]!r}") from error
        if size < 0 or digits[:1] in b"+-" or b"_" in digits:
            raise BadReply(f"a chunk of size {line[:20]!r}")
        if size:
            self._left = size + len(_LINE)
        else:
            self._in_trailer = True
