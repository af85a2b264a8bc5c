"""Builders of standard library types that pickles may name: OrderedDict, set, complex, bytes, slice, paths."""

from __future__ import annotations

from typing import Any

from holdfast.sources.pickles.values import Encoded, FileSpan, Name, Names, records

_BUILTINS = ("builtins", "__builtin__")
_TYPES = ("list", "dict", "tuple", "int", "long", "float", "str", "unicode", "bool")  # used by default dicts
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_KEYS = (str, int, float, bool, type(None))


def _ordered_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """Build an ordered dict, empty or from pairs."""
    if not arguments:
        return {}
    (pairs,) = arguments
    return {_key(key): value for key, value in (pairs.items() if type(pairs) is dict else pairs)}


def _default_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if len(arguments) > 1:
        raise ValueError("a default dict must be filled after it is created")
    return {}


def _counter(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    return dict(arguments[0]) if arguments and type(arguments[0]) is dict else {}


def _key(value: Any) -> Any:
    if not isinstance(value, _KEYS) or (isinstance(value, int) and value.bit_length() > 64):
        raise ValueError("not a key")
    return value


def _set(arguments: tuple[Any, ...]) -> set[Any]:
    return set(map(_key, arguments[0])) if arguments else set()


def _frozenset(arguments: tuple[Any, ...]) -> frozenset[Any]:
    return frozenset(_set(arguments))


def _complex(arguments: tuple[Any, ...]) -> complex:
    real, imag = arguments
    if type(real) is not float or type(imag) is not float:
        raise TypeError("not two numbers")
    return complex(real, imag)


def _bytearray(arguments: tuple[Any, ...]) -> Any:
    if not arguments:
        return b""
    data = arguments[0]
    if not isinstance(data, FileSpan | bytes | Encoded):
        raise TypeError("not bytes")
    return data


def _encode(arguments: tuple[Any, ...]) -> Any:
    """Build bytes as protocols 0 to 2 write them: a text to be encoded."""
    text, encoding = arguments
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("not Latin 1")
    if isinstance(text, FileSpan) and text.text:
        return Encoded(text)
    if type(text) is not str:
        raise TypeError("not a text")
    return text.encode("latin-1")


def _slice(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(arguments) != 3:
        raise ValueError("a slice has three parts")
    return arguments


COMMON: Names = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("collections", "defaultdict"): _default_dict,
    ("collections", "Counter"): _counter,
    ("_codecs", "encode"): _encode,
    **{(module, "set"): _set for module in _BUILTINS},
    **{(module, "frozenset"): _frozenset for module in _BUILTINS},
    **{(module, "complex"): _complex for module in _BUILTINS},
    **{(module, name): _bytearray for module in _BUILTINS for name in ("bytes", "bytearray")},
    **{(module, "slice"): _slice for module in _BUILTINS},
    **{(module, name): None for module in _BUILTINS for name in _TYPES},
    **records("argparse", "Namespace"),
    **records("_io", "BytesIO"),
    **records("pathlib", *_PATHS),
    **records("pathlib._local", *_PATHS),
}


def path_text(value: Any) -> str | None:
    """Return the text of a path's record, None for anything else."""
    name = getattr(value, "name", None)
    if type(name) is not Name or name.name not in _PATHS:
        return None
    parts = value.arguments
    return "/".join(parts) if all(type(part) is str for part in parts) else None
