"""Python values of state.json: encode and decode with tags for types that JSON lacks (tuple, bytes, NaN, numpy).

typed_values.py has the classes beyond these: paths, times, enums, dataclasses.

A tagged value is an object with one key that begins with "$". Ordinary dicts stay unchanged,
unless a key is not a string or begins with "$"; such a dict becomes a list of pairs.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.format.typed_values import TAGS, TypedValue, decode_typed, encode_typed, has_open_class

Keys = tuple[object, ...]
Leaf = Callable[[Any, str, Keys], Any]
_KNOWN_TAGS = TAGS | {
    *("$float", "$complex", "$bytes", "$bytearray", "$numpy", "$tuple", "$set", "$frozenset"),
    *("$dict", "$OrderedDict", "$Counter", "$tensor", "$array", "$option"),
}
# What an entry of state.json may be: plain values, trees with tensors, objects, and what belongs to groups of tensors.
ENTRY_KINDS = frozenset({"json", "tensors", "stateful", "optimizer", "module", "averages", "subclasses"})
_MAX_INT_BITS = 4096
_SMALL_INT = 1 << 62


def encode(value: Any, path: str, leaf: Leaf | None = None, keys: Keys = ()) -> Any:
    """Encode `value` as plain JSON; `leaf` may claim a value by returning something other than None.

    `path` names the value in messages. `keys` are the dict keys and list indices that lead to it.

    Raises Unsupported, with the path inside the state, for a value that cannot be represented.
    """
    if len(keys) > limits.JSON_DEPTH // 4:
        raise Unsupported(f"{path}: nested deeper than {limits.JSON_DEPTH // 4}, or contains itself")
    if leaf is not None and (claimed := leaf(value, path, keys)) is not None:
        return claimed
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _encode_text(value, path)
    if kind is int:
        return _encode_int(value, path)
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is complex:
        return {"$complex": [encode(value.real, path), encode(value.imag, path)]}
    if kind is bytes or kind is bytearray:
        return {f"${kind.__name__}": base64.b64encode(value).decode()}
    return _encode_container(value, path, leaf, keys)


def _is_plain(value: Any) -> bool:
    """Return True if JSON has the value as it is: a fast path for the bulk of large states."""
    kind = type(value)
    if kind is int:
        return -_SMALL_INT < value < _SMALL_INT  # type: ignore[no-any-return]
    if kind is float:
        return math.isfinite(value)
    if kind is str:
        return value.isascii()  # type: ignore[no-any-return]
    return value is None or kind is bool


def _encode_text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unsupported(f"{path}: a string that is not valid Unicode cannot be stored; store its bytes") from None
    return value


def _encode_int(value: int, path: str) -> int:
    if value.bit_length() > _MAX_INT_BITS:
        raise Unsupported(f"{path}: an integer of {value.bit_length()} bits exceeds the limit of {_MAX_INT_BITS}")
    return value


def _encode_container(value: Any, path: str, leaf: Leaf | None, keys: Keys) -> Any:
    kind = type(value)

    def inner(item: Any, more: str, key: object) -> Any:
        return encode(item, path + more, leaf, (*keys, key))

    if kind is list or kind is tuple or (isinstance(value, tuple) and kind.__module__ == "torch"):
        shallow = len(keys) < limits.JSON_DEPTH // 4
        items = [
            item if shallow and _is_plain(item) else encode(item, f"{path}[{index}]", leaf, (*keys, index))
            for index, item in enumerate(value)
        ]
        return items if kind is list else {"$tuple": items}
    if kind is set or kind is frozenset:
        items = [_encode_hashable(item, f"{path}{{}}", (*keys, "{}")) for item in value]
        return {f"${kind.__name__}": sorted(items, key=repr)}
    if kind is dict:
        return _encode_dict(value, path, leaf, keys)
    if kind is OrderedDict or kind is Counter or kind is defaultdict:
        return {f"${kind.__name__}": _encode_pairs(value, path, leaf, keys)}
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and hasattr(value, "dtype"):
        return _encode_numpy_scalar(value, path)
    if not hasattr(kind, "state_dict") and (typed := encode_typed(value, path, inner)) is not None:
        return typed
    hint = "use numbers, strings, bytes, lists, tuples, dicts or tensors"
    if hasattr(kind, "state_dict"):
        hint = "objects with a state_dict are only saved at the top level of the state: give it its own name there"
    elif kind.__name__ == "DataLoader":
        hint = "it keeps no position: save holdfast.Batches(loader), and iterate over that"
    raise Unsupported(f"{path}: a value of type {kind.__module__}.{kind.__qualname__} cannot be stored as JSON; {hint}")


def _encode_dict(value: dict[Any, Any], path: str, leaf: Leaf | None, keys: Keys) -> Any:
    if all(type(key) is str and key[:1] != "$" and (key.isascii() or _encode_text(key, path)) for key in value):
        if len(keys) >= limits.JSON_DEPTH // 4:
            return {key: encode(item, f"{path}.{key}", leaf, (*keys, key)) for key, item in value.items()}
        return {
            key: item if _is_plain(item) else encode(item, f"{path}.{key}", leaf, (*keys, key))
            for key, item in value.items()
        }
    return {"$dict": _encode_pairs(value, path, leaf, keys)}


def _encode_pairs(value: dict[Any, Any], path: str, leaf: Leaf | None, keys: Keys) -> list[list[Any]]:
    return [
        [
            _encode_hashable(key, f"{path} key {key!r}", (*keys, key)),
            encode(item, f"{path}[{key!r}]", leaf, (*keys, key)),
        ]
        for key, item in value.items()
    ]


def _encode_hashable(value: Any, path: str, keys: Keys) -> Any:
    """Encode a key of a dict or a member of a set."""
    if has_open_class(value):
        kind = type(value)
        raise Unsupported(
            f"{path}: a {kind.__module__}.{kind.__qualname__} as a key or in a set cannot be stored; use its name, "
            "number or plain tuple"
        )
    if type(value) is tuple:
        return {"$tuple": [_encode_hashable(item, path, (*keys, index)) for index, item in enumerate(value)]}
    return encode(value, path, None, keys)


def _encode_numpy_scalar(value: Any, path: str) -> dict[str, Any]:
    name = value.dtype.name
    if value.dtype.kind not in "biufc":
        raise Unsupported(f"{path}: a numpy scalar of dtype {name} cannot be stored as JSON")
    return {"$numpy": [name, value.tobytes().hex()]}


def decode(
    value: Any,
    where: str,
    leaf: Callable[[str, Any], Any] | None = None,
    typed: Callable[[TypedValue], Any] = TypedValue.plain,
) -> Any:
    """Decode a value; `leaf(tag, content)` decodes the values that the leaf of `encode` claimed.

    `typed` gets the values whose class only the program has; without it they become plain data.
    """
    if not isinstance(value, list | dict):
        return value

    def inner(item: Any) -> Any:
        return decode(item, where, leaf, typed)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag.startswith("$"):
            return _decode_tag(tag, content, where, leaf, inner, typed)
    return {key: inner(item) for key, item in value.items()}


def _decode_tag(
    tag: str,
    content: Any,
    where: str,
    leaf: Callable[[str, Any], Any] | None,
    inner: Callable[[Any], Any],
    typed: Callable[[TypedValue], Any],
) -> Any:
    try:
        if tag in TAGS:
            return decode_typed(tag, content, inner, typed)
        if tag == "$float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
        if tag == "$complex":
            real, imag = map(inner, content)
            return complex(real, imag)
        if tag in ("$bytes", "$bytearray"):
            data = base64.b64decode(content, validate=True)
            return data if tag == "$bytes" else bytearray(data)
        if tag == "$numpy":
            return _decode_numpy_scalar(content)
        if tag in ("$tuple", "$set", "$frozenset"):
            items = [inner(item) for item in content]
            return tuple(items) if tag == "$tuple" else set(items) if tag == "$set" else frozenset(items)
        if tag in ("$dict", "$OrderedDict", "$Counter"):
            pairs = {inner(key): inner(item) for key, item in content}
            return pairs if tag == "$dict" else OrderedDict(pairs) if tag == "$OrderedDict" else Counter(pairs)
    except HoldfastError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise Damaged(f"{where}: invalid {tag} value: {error}") from None
    if leaf is not None:
        return leaf(tag, content)
    raise Damaged(f"{where}: unknown tag {tag[:40]!r}")


def _decode_numpy_scalar(content: Any) -> Any:
    import numpy as np

    from holdfast.format.dtypes import is_dtype, numpy_dtype

    name, data = content
    if name not in np.sctypeDict and not is_dtype(name):
        raise ValueError(f"{name!r} is not a dtype")
    dtype = np.dtype(name) if name in np.sctypeDict else numpy_dtype(name)
    raw = bytes.fromhex(data)
    if len(raw) != dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for a {name}")
    return np.frombuffer(raw, dtype=dtype)[0]


def unknown_tag(value: Any) -> str | None:
    """Return a tag in an encoded value that this version does not know, or None."""
    if isinstance(value, list):
        return next(filter(None, map(unknown_tag, value)), None)
    if not isinstance(value, dict):
        return None
    if len(value) == 1 and (tag := next(iter(value))).startswith("$") and tag not in _KNOWN_TAGS:
        return str(tag)
    return next(filter(None, map(unknown_tag, value.values())), None)


def is_entry(entry: Any) -> bool:
    """Return True for the shape of a state.json entry: one value, values by coordinate, or parameter groups."""
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return False
    if entry["kind"] == "optimizer":
        groups = entry.get("groups")
        return isinstance(groups, list) and all(
            isinstance(g, dict) and {"params", "options"} <= g.keys() for g in groups
        )
    if "value" in entry:
        return True
    axes, sizes = entry.get("axes"), entry.get("sizes")
    if not isinstance(axes, list) or not isinstance(sizes, list) or len(axes) != len(sizes):
        return False
    return all(isinstance(axis, str) for axis in axes) and isinstance(entry.get("values"), dict)
