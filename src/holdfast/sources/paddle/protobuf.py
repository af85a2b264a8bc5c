"""A minimal protobuf decoder: fields of a message by number, as Paddle's program descriptions use them."""

from __future__ import annotations

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class MalformedMessage(Exception):
    """The bytes are not a valid message; the text says where."""


class ProtobufMessage:
    """The fields of a message, numbers and bytes, in order."""

    def __init__(self, data: bytes) -> None:
        self._fields: dict[int, list[int | bytes]] = {}
        at = 0
        while at < len(data):
            tag, at = _varint(data, at)
            value, at = _value(data, at, tag & 7)
            self._fields.setdefault(tag >> 3, []).append(value)

    def numbers(self, field: int) -> list[int]:
        """Return all numbers of a field, packed or not, as signed integers."""
        out: list[int] = []
        for value in self._fields.get(field, ()):
            if isinstance(value, int):
                out.append(value)
                continue
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                out.append(number)
        return [number - (1 << 64) if number >> 63 else number for number in out]

    def number(self, field: int) -> int:
        """Return the last number of a field, or 0 if it has none."""
        return (self.numbers(field) or [0])[-1]

    def messages(self, field: int) -> list[ProtobufMessage]:
        return [ProtobufMessage(value) for value in self._of_bytes(field)]

    def message(self, field: int) -> ProtobufMessage | None:
        return (self.messages(field) or [None])[-1]  # type: ignore[list-item]

    def text(self, field: int) -> str:
        found = self._of_bytes(field)
        if not found:
            raise MalformedMessage(f"field {field} is missing")
        try:
            return found[-1].decode("utf-8")
        except UnicodeDecodeError:
            raise MalformedMessage(f"field {field} is not text") from None

    def _of_bytes(self, field: int) -> list[bytes]:
        values = self._fields.get(field, [])
        found = [value for value in values if isinstance(value, bytes)]
        if len(found) < len(values):
            raise MalformedMessage(f"field {field} is a number")
        return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_LONGEST_VARINT):
        if at + index >= len(data):
            break
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & ((1 << 64) - 1), at + index + 1
    raise MalformedMessage(f"an unterminated number at byte {at}")


def _value(data: bytes, at: int, kind: int) -> tuple[int | bytes, int]:
    if kind == _VARINT:
        return _varint(data, at)
    if kind == _BYTES:
        size, at = _varint(data, at)
    elif kind in (_FIXED64, _FIXED32):
        size = 8 if kind == _FIXED64 else 4
    else:
        raise MalformedMessage(f"a field of unknown wire type {kind} at byte {at}")
    if at + size > len(data):
        raise MalformedMessage(f"a field of {size} bytes at byte {at} exceeds the message of {len(data)} bytes")
    value = data[at : at + size]
    return (value if kind == _BYTES else int.from_bytes(value, "little")), at + size
