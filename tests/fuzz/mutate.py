"""Mutations: of bytes, and of the JSON tree inside them."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.fuzz.targets import Target

_TOKENS: tuple[bytes, ...] = (
    b"1e400",
    b"-1e400",
    b"1e-400",
    b"-0",
    b"1.0",
    b"9" * 5000,
    b"9" * 4000,
    b"1e" + b"9" * 50,
    b"NaN",
    b"Infinity",
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b'"\\u0000"',
    b'"\xff\xfe"',
    b'"\xed\xa0\x80"',
    b"\xef\xbb\xbf",
    b"\xc2\xa0",
    b"\t\r\n \x0b",
    b"[" * 150 + b"]" * 150,
    b'{"a":' * 200 + b"0" + b"}" * 200,
    b"[" * 5000,
    b'{"$tuple":' * 60 + b"[]" + b"}" * 60,
    b'"' + b"k" * 2000 + b'"',
    b"true",
    b"null",
    b"{}",
    b"[]",
    b'""',
)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.0, 1.5, -0.0, 1e308,
    "", "a", "..", "/etc/x", "con", "A" * 300, "\x1b[2J", "\u2028", "__metadata__", "holdfast.json", "STATE.JSON",
    [], {}, [0], [0, 0], [[]], [None], {"": None}, {"a": {}}, {"$float": "nan"}, {"$float": 5}, {"$tuple": 5},
    {"$tuple": [1]}, {"$dict": [[[], 1]]}, {"$dict": [1]}, {"$set": [[1]]}, {"$set": [{"$set": []}]},
    {"$complex": [1]}, {"$complex": [{}, 1]}, {"$bytes": "é"}, {"$bytes": 5}, {"$bytearray": "!"},
    {"$numpy": ["float32", "00"]}, {"$numpy": ["object", "00" * 8]}, {"$numpy": [[], "00"]}, {"$numpy": ["V8", 5]},
    {"$numpy": ["bfloat16", "0000"]}, {"$numpy": ["float4_e2m1fn_x2", "00"]}, {"$numpy": {"a": 1}},
    {"$Counter": [[1, "x"]]},
    {"$OrderedDict": [[1, 2, 3]]}, {"$frozenset": "ab"}, {"$dict": {"ab": 1}}, {"$": 1}, {"$tensor": []},
)  # fmt: skip


def mutated(target: Target, data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """An input that is `data` with a few things changed."""
    if chance.random() < 0.6:
        tree = _tree(target, data)
        if tree is not None:
            return _from_tree(target, tree, others, chance)
    out = bytearray(data)
    for _ in range(1 + int(chance.expovariate(0.7))):
        _change_bytes(out, others, chance)
    return bytes(out[:100_000])


def _change_bytes(out: bytearray, others: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(out) + 1)
    end = min(len(out), at + chance.choice((1, 1, 2, 8, 50)))
    kind = chance.randrange(7)
    if kind == 0 and at < len(out):
        out[at] ^= 1 << chance.randrange(8)
    elif kind == 1 and at < len(out):
        out[at] = chance.randrange(256)
    elif kind == 2:
        del out[at:end]
    elif kind == 3:
        del out[at:]
    elif kind == 4:
        out[at:end] = chance.choice(_TOKENS)
    elif kind == 5:
        out[at:at] = out[at:end] * chance.choice((1, 2, 100))
    else:
        other = chance.choice(others)
        begin = chance.randrange(len(other) + 1)
        out[at:end] = other[begin : begin + chance.randrange(200)]


def _tree(target: Target, data: bytes) -> Any:
    try:
        return json.loads(target.unseal(data))
    except (ValueError, RecursionError, AttributeError, TypeError):
        return None  # not JSON any more: its bytes are changed instead


def _from_tree(target: Target, tree: Any, others: list[bytes], chance: random.Random) -> bytes:
    box = [tree]
    tokens: dict[str, bytes] = {}
    for _ in range(1 + int(chance.expovariate(1.0))):
        _change_tree(box, tokens, _tree(target, chance.choice(others)), chance)
    try:
        text = json.dumps(box[0], separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    except (ValueError, RecursionError):
        return target.seeds[0]
    for mark, token in tokens.items():
        text = text.replace(b'"' + mark.encode() + b'"', token)
    return target.seal(text)


def _change_tree(box: list[Any], tokens: dict[str, bytes], other: Any, chance: random.Random) -> None:
    holder, at = chance.choice(_spots(box))
    kind = chance.randrange(8)
    if kind <= 2:
        holder[at] = chance.choice(_VALUES)
    elif kind == 3 and holder is not box:
        del holder[at]
    elif kind == 4:
        mark = f"@raw{len(tokens)}@"
        tokens[mark] = chance.choice(_TOKENS)
        holder[at] = mark
    elif kind == 5 and isinstance(holder, dict):
        holder[chance.choice(("", "..", "a\n", "k" * 1100, "STATE.JSON", "$dict", "digest", "x"))] = holder.pop(at)
    elif kind == 6 and isinstance(holder, dict):  # a key that stands twice
        mark = f"@raw{len(tokens)}@"
        tokens[mark] = b"0," + json.dumps(at).encode() + b":0"
        holder[at] = mark
    else:
        source, place = chance.choice(_spots([other]))
        holder[at] = json.loads(json.dumps(source[place]))


def _spots(box: list[Any]) -> list[tuple[Any, Any]]:
    """Every place of a tree, as the container and the position in it."""
    found: list[tuple[Any, Any]] = []
    waiting: list[Any] = [box]
    while waiting and len(found) < 2000:
        holder = waiting.pop()
        for at, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            found.append((holder, at))
            if isinstance(value, dict | list):
                waiting.append(value)
    return found
