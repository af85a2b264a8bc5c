"""The pickle machine: the opcodes of protocols 0 to 5, which build inert values and can do nothing else.

A class or function in a pickle is a Name. Only names on the caller's list are allowed, and the caller's
own pure functions build their values. A file cannot cause an import, a call or an assignment. The machine
does not recurse, and the size of the file bounds what it builds.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, Unsupported
from holdfast.sources.pickles.byte_windows import PickleStream
from holdfast.sources.pickles.stack import Stack
from holdfast.sources.pickles.values import FileSpan, Name, Names, Record

INLINE_BYTES = 1024
TEXT_BYTES = 1 * limits.MIB
_LINE_BYTES = 64 * limits.KIB
_INT_BYTES = 512
_INT_DIGITS = 1200
_TUPLE_KEYS = 4096  # hashes of tuples can be made to collide, those of strings cannot
_KEY_ITEMS = 16
_PROTOCOL = 5
_PLAIN_KEYS = (str, int, float, bool, type(None))

Persistent = Callable[[Any], Any]


class Machine(Stack):
    """One run over one pickle."""

    def __init__(self, stream: PickleStream, names: Names, persistent: Persistent | None = None) -> None:
        super().__init__(stream)
        self._names = names
        self._persistent = persistent
        self._tuple_keys = 0
        self.opcodes = 0

    def run(self) -> Any:
        """Return the value of the pickle; the stream is then positioned after it."""
        stream, handlers = self._stream, _HANDLERS
        while True:
            if stream.at < len(stream.window):  # inlined: a call would take as long as the operation
                code = stream.window[stream.at]
                stream.at += 1
            else:
                code = stream.take(1)[0]
            if code == _STOP:
                return self._result()
            self.opcodes += 1
            handler = handlers.get(code)
            if handler is None:
                raise self._damaged(f"unknown operation {bytes([code])!r}")
            handler(self)

    def _result(self) -> Any:
        if self._marks or len(self._stack) != 1:
            raise self._damaged(f"it ends with {len(self._stack)} values and {len(self._marks)} open marks")
        return self._stack[0]

    # Numbers and texts

    def _unpacked(self, form: struct.Struct) -> Any:
        return form.unpack(self._stream.take(form.size))[0]

    def _number_line(self) -> bytes:
        return self._stream.take_line(_INT_DIGITS)

    def _integer(self, line: bytes) -> int:
        try:
            return int(line)
        except ValueError:
            raise self._damaged(f"{line[:40]!r} is not a number") from None

    def _int_text(self) -> None:
        line = self._number_line()
        self._push({b"00": False, b"01": True}[line] if line in (b"00", b"01") else self._integer(line))

    def _long_text(self) -> None:
        self._push(self._integer(self._number_line().removesuffix(b"L")))

    def _float_text(self) -> None:
        line = self._number_line()
        try:
            self._push(float(line))
        except ValueError:
            raise self._damaged(f"{line[:40]!r} is not a number") from None

    def _long(self, size: int) -> None:
        if not 0 <= size <= _INT_BYTES:
            raise self._damaged(f"a number of {size} bytes, more than the limit of {_INT_BYTES}")
        self._push(int.from_bytes(self._stream.take(size), "little", signed=True))

    def _text(self, size: int) -> None:
        self._stream.require(size)
        if size > TEXT_BYTES:
            self._push(FileSpan(self._stream.position, size, text=True))
            self._stream.skip(size)
            return
        try:
            self._push(self._stream.take(size).decode())
        except UnicodeDecodeError as error:
            raise self._damaged(f"a text that is not UTF-8: {error.reason}") from None

    def _text_line(self) -> None:
        line = self._stream.take_line(_LINE_BYTES)
        try:
            text = line.decode("raw-unicode-escape")
            text.encode()
        except UnicodeError as error:
            raise self._damaged(f"a text that is not Unicode: {error.__class__.__name__}") from None
        self._push(text)

    def _bytes(self, size: int) -> None:
        self._stream.require(size)
        offset = self._stream.position
        if size > INLINE_BYTES:
            self._stream.skip(size)
            self._push(FileSpan(offset, size))
            return
        self._push_object(FileSpan(offset, size, data=self._stream.take(size)))

    def _old_string(self, size: int) -> None:
        """Push a Python 2 string: bytes if it is long, as for arrays, otherwise Latin-1 text."""
        if size < 0:
            raise self._damaged(f"a string of {size} bytes")
        if size > INLINE_BYTES:
            self._bytes(size)
            return
        self._push(self._stream.take(size).decode("latin-1"))

    def _quoted_line(self) -> None:
        line = self._stream.take_line(_LINE_BYTES).strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"') or _ends_escaped(line[1:-1]):
            raise self._damaged("a string without its quotes")
        try:
            self._push(codecs.escape_decode(line[1:-1])[0].decode("latin-1"))
        except ValueError as error:
            raise self._damaged(f"a bad string: {str(error)[:80]}") from None

    # Containers

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise self._damaged(f"a tuple of {count} of {len(self._stack)} values")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._push_object(items)

    def _append(self, items: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise self._damaged(f"an item is added to a {type(target).__name__}, not to a list")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict:
            raise self._damaged(f"a key is set in a {type(target).__name__}, not in a dict")
        if len(items) % 2:
            raise self._damaged("a key without a value")
        for index in range(0, len(items), 2):
            target[self._key(items[index])] = items[index + 1]

    def _add_items(self, items: list[Any]) -> None:
        target = self._top()
        if type(target) is not set:
            raise self._damaged(f"an item is added to a {type(target).__name__}, not to a set")
        target.update(map(self._key, items))

    def _key(self, value: Any) -> Any:
        """Return a value that may be a dict key: its hash must be fast and hard to make collide."""
        if isinstance(value, int) and value.bit_length() > 64:
            raise self._damaged("a number of more than 64 bits as a key")
        if isinstance(value, _PLAIN_KEYS) or type(value) is Name or type(value) is Record:
            return value
        if type(value) is tuple and len(value) <= _KEY_ITEMS and all(isinstance(item, _PLAIN_KEYS) for item in value):
            self._tuple_keys += 1
            if self._tuple_keys <= _TUPLE_KEYS:
                return value
        raise self._damaged(f"a {type(value).__name__} cannot be a key")

    def _dict(self) -> None:
        items = self._since_mark()
        self._push_object({})
        self._set_items(items)

    # Names and the objects built from them

    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self._damaged("a name that is not a text")
        if (module, name) not in self._names:
            raise Unsupported(
                f"{self._stream.where}: the pickle names {f'{module}.{name}'[:100]!r} at byte "
                f"{self._stream.position}; such objects are not supported, because building them could run code. "
                "Save only tensors, numbers, strings, lists and dicts, or convert with the tool that wrote the file"
            )
        self._push_object(Name(module, name))

    def _global(self) -> None:
        module, name = (self._stream.take_line(_LINE_BYTES) for _ in range(2))
        try:
            self._name(module.decode(), name.decode())
        except UnicodeDecodeError:
            raise self._damaged("a name that is not UTF-8") from None

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._name(module, name)

    def _make(self, what: Any, arguments: Any) -> None:
        if type(what) is not Name:
            raise self._damaged(f"a {type(what).__name__} is called")
        if type(arguments) is not tuple:
            raise self._damaged(f"{str(what)[:100]!r} is called with a {type(arguments).__name__}")
        builder = self._names[what.module, what.name]
        if builder is None:
            raise self._damaged(f"{str(what)[:100]!r} is called")
        for item in arguments[:1]:
            if isinstance(item, list | tuple | dict):
                self._count(len(item))  # an object built from a shared list counts every time
        try:
            self._push_object(builder(arguments))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
            if isinstance(error, Damaged | Unsupported):
                raise
            raise self._damaged(f"{str(what)[:100]!r} with bad arguments: {type(error).__name__}") from None

    def _reduce(self) -> None:
        arguments, what = self._pop(), self._pop()
        self._make(what, arguments)

    def _new_with_keywords(self) -> None:
        keywords, arguments, what = self._pop(), self._pop(), self._pop()
        if keywords != {}:
            raise self._damaged("an object is built with keyword arguments")
        self._make(what, arguments)

    def _instance(self) -> None:
        arguments = self._since_mark()
        self._global()
        self._make(self._pop(), tuple(arguments))

    def _object(self) -> None:
        items = self._since_mark()
        if not items:
            raise self._damaged("an object without a class")
        self._make(items[0], tuple(items[1:]))

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if type(target) is Record:
            if target.state is not None:
                raise self._damaged(f"{str(target.name)[:100]!r} is given a state twice")
            target.state = state
        elif type(target) is not dict:  # attributes of an ordered dict do not affect its items
            raise self._damaged(f"a {type(target).__name__} is given a state")

    def _persist(self, token: Any) -> None:
        if self._persistent is None:
            raise self._damaged("a reference to something outside the pickle")
        self._push_object(self._persistent(token))

    def _persist_line(self) -> None:
        line = self._stream.take_line(_LINE_BYTES)
        self._persist(line.decode("latin-1"))

    # Frames

    def _protocol(self) -> None:
        version = self._stream.take(1)[0]
        if version > _PROTOCOL:
            raise self._damaged(f"protocol {version}, the newest known is {_PROTOCOL}")

    def _frame(self) -> None:
        self._stream.require(self._unpacked(_U8))


def _ends_escaped(text: bytes) -> bool:
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1


_U1, _U2, _U4, _U8 = (struct.Struct(form) for form in ("<B", "<H", "<I", "<Q"))
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_STOP = ord(".")

_HANDLERS: dict[int, Callable[[Machine], None]] = {
    ord("("): Machine._mark,
    ord("0"): Machine._drop,
    ord("1"): Machine._forget_since_mark,
    ord("2"): lambda m: m._push(m._top()),
    ord("F"): Machine._float_text,
    ord("I"): Machine._int_text,
    ord("J"): lambda m: m._push(m._unpacked(_I4)),
    ord("K"): lambda m: m._push(m._unpacked(_U1)),
    ord("M"): lambda m: m._push(m._unpacked(_U2)),
    ord("L"): Machine._long_text,
    ord("N"): lambda m: m._push(None),
    ord("P"): Machine._persist_line,
    ord("Q"): lambda m: m._persist(m._pop()),
    ord("R"): Machine._reduce,
    ord("S"): Machine._quoted_line,
    ord("T"): lambda m: m._old_string(m._unpacked(_I4)),
    ord("U"): lambda m: m._old_string(m._unpacked(_U1)),
    ord("V"): Machine._text_line,
    ord("X"): lambda m: m._text(m._unpacked(_U4)),
    ord("a"): lambda m: m._append([m._pop()]),
    ord("b"): Machine._build,
    ord("c"): Machine._global,
    ord("d"): Machine._dict,
    ord("}"): lambda m: m._push_object({}),
    ord("e"): lambda m: m._append(m._since_mark()),
    ord("g"): lambda m: m._get(m._integer(m._number_line())),
    ord("h"): lambda m: m._get(m._unpacked(_U1)),
    ord("i"): Machine._instance,
    ord("j"): lambda m: m._get(m._unpacked(_U4)),
    ord("l"): lambda m: m._push_object(m._since_mark()),
    ord("]"): lambda m: m._push_object([]),
    ord("o"): Machine._object,
    ord("p"): lambda m: m._put(m._integer(m._number_line())),
    ord("q"): lambda m: m._put(m._unpacked(_U1)),
    ord("r"): lambda m: m._put(m._unpacked(_U4)),
    ord("s"): lambda m: m._set_items([m._pop(), m._pop()][::-1]),
    ord("t"): lambda m: m._push_object(tuple(m._since_mark())),
    ord(")"): lambda m: m._push(()),
    ord("u"): lambda m: m._set_items(m._since_mark()),
    ord("G"): lambda m: m._push(m._unpacked(_F8)),
    0x42: lambda m: m._bytes(m._unpacked(_U4)),  # B
    0x43: lambda m: m._bytes(m._unpacked(_U1)),  # C
    0x80: Machine._protocol,
    0x81: Machine._reduce,  # for a class, with the same arguments
    0x85: lambda m: m._tuple(1),
    0x86: lambda m: m._tuple(2),
    0x87: lambda m: m._tuple(3),
    0x88: lambda m: m._push(True),
    0x89: lambda m: m._push(False),
    0x8A: lambda m: m._long(m._unpacked(_U1)),
    0x8B: lambda m: m._long(m._unpacked(_I4)),
    0x8C: lambda m: m._text(m._unpacked(_U1)),
    0x8D: lambda m: m._text(m._unpacked(_U8)),
    0x8E: lambda m: m._bytes(m._unpacked(_U8)),
    0x8F: lambda m: m._push_object(set()),
    0x90: lambda m: m._add_items(m._since_mark()),
    0x91: lambda m: m._push_object(frozenset(map(m._key, m._since_mark()))),
    0x92: Machine._new_with_keywords,
    0x93: Machine._stack_global,
    0x94: lambda m: m._put(m._next_memo()),
    0x95: Machine._frame,
    0x96: lambda m: m._bytes(m._unpacked(_U8)),
}
