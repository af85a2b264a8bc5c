"""The mapping language as a fuzzing target: a program with the keys that it is run over.

An input is a JSON object. For mutation its statements are taken apart into tokens, so that changes
of the tree are changes of the grammar: tokens left out, doubled, moved from one program into another.
"""

from __future__ import annotations

import json
import re
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.format import strictjson
from holdfast.format.dtypes import dtype_named
from holdfast.mapping import Mapping, Sized
from holdfast.mapping.compile.compile import compile_program

_TOKEN = re.compile(r"->|\^T|[,=\[\]:*]|\$\{?[A-Z_]+\}?|[^\s,=\[\]:*$^]+|\s+|.")
_WORK = 20_000
_LARGEST = 1 << 40
_RANK = 6

Sources = dict[str, Sized]


def _seed(program: list[str], sources: dict[str, list[int]], targets: dict[str, list[int]] | None = None) -> bytes:
    value = {"program": program, "sources": sources, "targets": targets, "tp": [2, 1]}
    return json.dumps(value, separators=(",", ":")).encode()


def mapping_seeds() -> tuple[bytes, ...]:
    """Programs of every form."""
    layers = {f"m.{n}.e.{e}.{p}": [4, 6] for n in range(2) for e in range(n + 2) for p in "gu"}
    qkv = {"q": [3, 8], "k": [3, 4], "v": [3, 4], "g": [2, 8], "u": [2, 8]}
    heads = "num_heads=4, num_key_value_groups=2"
    simple = {"a": [2, 3], "c": [3, 1], "x": [], "w x": [0]}
    offsets = {"n.1.w": [1], "n.2.w": [2], "c": [3], "e.1.w": [2], "f": [4]}
    stacked = {"m.0.e.0.g": [2, 3], "m.0.e.1.g": [2, 3], "q": [3, 2]}
    parts = {"e.0": [3, 2], "e.1": [4, 2], "f": [3, 2]}
    return (
        _seed(["a -> b", "b^T, c -> d, axis=1", "x -> _", "_ -> z", "'w x'->y"], simple),
        _seed(["m.$LAYER_ID.e.*.g -> n.$LAYER_ID, axis=0", "m.$L.e.$EXPERT_ID.u^T -> o.$L.$EXPERT_ID"], layers),
        _seed(["n.$LAYER_ID_OFFSET.w -> n.$LAYER_ID_OFFSET.w", "c -> x[0:3], axis=0"], offsets),
        _seed(["e.${X+1}.w -> e.$X.w", "f -> t.*, axis=0, parts=2", "t.$N -> t2.$N, optional"], offsets),
        _seed(
            ["m.$L.e.*.g -> s.$L, axis=0, stack", "s.$L -> u.$L.*, axis=1, unstack", "f -> v.*, axis=0, stack"],
            {**layers, "f": [2, 3]},
        ),
        _seed([f"q,k,v -> w, fused_qkv, {heads}", "g,u -> f, fused_ffn", "f -> h, fused_ffn, tp_degree=4"], qkv),
        _seed([f"q,k,v -> w, fused_qkv_old, {heads}, tp_degree=4", f"w -> x, fused_qkv_old, {heads}"], qkv),
        _seed(["m.0.e.*.g -> n, axis=0, stack", "n -> o.*, axis=-1, stack", "q -> a, b, axis=1, stack"], stacked),
        _seed(
            ["c -> e.*, axis=0, sizes=targets", "d -> f, permute='[1,0]', src_dtype='float32', dst_dtype='bfloat16'"],
            {"c": [7, 2], "d": [2, 3]},
            parts,
        ),
    )


def parse_mapping(data: bytes) -> object:
    """Parse, compile, explain, turn round and compile again; refusals are good answers."""
    value = strictjson.loads(data, "fuzz")
    if not isinstance(value, dict):
        value = {"program": value}
    mapping = Mapping.parse(
        value.get("program", []) if not isinstance(value.get("program"), str) else [value["program"]]
    )
    assert Mapping.parse(str(mapping)) == mapping, "it prints as another program"
    sources, targets = _specs(value.get("sources")), value.get("targets")
    tp = value.get("tp")
    source_tp, target_tp = tp if isinstance(tp, list) and len(tp) == 2 else (None, None)
    degrees = [d if isinstance(d, int) and 0 < d < 10_000 else None for d in (source_tp, target_tp)]
    wanted = None if targets is None else _specs(targets)
    compiled = compile_program(
        mapping.statements, sources, wanted, source_tp=degrees[0], target_tp=degrees[1], max_work=_WORK
    )
    for back in (mapping.reverse, lambda: mapping.reverse({key: spec.shape for key, spec in sources.items()})):
        try:
            _check_back(back(), compiled.recipes, sources)
        except HoldfastError:
            continue
    return compiled


def _check_back(reverse: Mapping, made: dict[str, Any], sources: Sources) -> None:
    assert Mapping.parse(str(reverse)) == reverse, "its reverse prints as another program"
    specs = {key: Sized(recipe.shape, recipe.dtype) for key, recipe in made.items()}
    again = compile_program(reverse.statements, specs, sources, source_tp=1, max_work=_WORK)
    for key, recipe in again.recipes.items():
        assert recipe.shape == sources[key].shape, "its reverse makes another shape"


def _specs(value: object) -> Sources:
    dtype = dtype_named("float32")
    out: Sources = {}
    for key, shape in value.items() if isinstance(value, dict) else ():
        sizes = shape if isinstance(shape, list) else [1]
        good = [size for size in sizes if isinstance(size, int) and 0 <= size < _LARGEST]
        out[key] = Sized(tuple(good[:_RANK]), dtype)
    return out


def unseal_mapping(data: bytes) -> bytes:
    """The object with every statement as a list of tokens."""
    value = json.loads(data)
    value["program"] = [_TOKEN.findall(statement) for statement in value.get("program")]
    return json.dumps(value).encode()


def seal_mapping(text: bytes) -> bytes:
    """The object with every list of tokens as a statement again."""
    try:
        value = json.loads(text)
        value["program"] = [_joined(statement) for statement in value["program"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return text
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _joined(tokens: object) -> str:
    return "".join(str(token) for token in tokens) if isinstance(tokens, list) else str(tokens)
