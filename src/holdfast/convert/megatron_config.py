"""Compare a config.json with a Megatron checkpoint: the shapes of its weights, and its args (see megatron_args).

Megatron joins q, k and v by head, so that wrong numbers of heads would deal the rows to the wrong weights without
an error. Shapes give the products of heads and head size; only args, or norms of heads, tell the factors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.convert.megatron_args import contradictions, layout_contradictions, notes_of
from holdfast.core.errors import Mismatch
from holdfast.mapping.families import numbers
from holdfast.mapping.families.numbers import Config, MissingNumber
from holdfast.mapping.syntax.statement import Spec

_CONFIG = "config.json"
_LAYER = re.compile(r"decoder\.layers\.(?:(?P<number>[0-9]+)\.)?(?P<name>[a-z].*)")
_EMBEDDING = "embedding.word_embeddings.weight"
_QKV, _PROJECTION = "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"
_QUERY_NORM = "self_attention.q_layernorm.weight"


def check_config(stored: Mapping[str, Spec], args: Any, config: Config, name: str = _CONFIG) -> tuple[str, ...]:
    """Raise Mismatch, with both values, if a config.json is not that of a Megatron checkpoint.

    `args` are Megatron's options in the checkpoint, if it has them. `name` is the file that the config is from.
    Returns notes about what nothing tells, such as the numbers of heads.
    """
    layers = _layer_shapes(stored)
    problems = [*_by_shapes(stored, layers, config), *_by_args(layers, args, config)]
    problems += [*contradictions(args, config, stored), *layout_contradictions(args, config)]
    _raise(problems, name)
    notes = notes_of(args, config, stored)
    if _QKV not in layers or _QUERY_NORM in layers or _heads_in(args):
        return notes
    return (
        f"num_attention_heads {_known(numbers.heads, config)} and num_key_value_heads "
        f"{_known(numbers.key_value_heads, config)} of config.json are taken as they are: the checkpoint has no args "
        "to compare them with, and other numbers of heads can have the same shapes",
        *notes,
    )


def check_values(stored: Mapping[str, Spec], args: Any, config: Config, name: str = _CONFIG) -> tuple[str, ...]:
    """Raise Mismatch if args contradict a config.json in what no mapping changes. For the user's own statements."""
    _raise([*contradictions(args, config, stored)], name)
    return notes_of(args, config, stored)


def _raise(problems: Sequence[str], name: str) -> None:
    if problems:
        own = "give the model's own with --config"
        raise Mismatch(
            f"{name} is not that of this checkpoint: {'; '.join(problems)}; "
            f"{own if name == _CONFIG else f'correct it, or {own}'}"
        )


def check_given(given: Config, own: Config) -> None:
    """Raise Mismatch, with both numbers, if a given config.json contradicts the source's own in what mappings use."""
    numbers_of: dict[str, Callable[[Config], int]] = {
        "num_attention_heads": numbers.heads,
        "num_key_value_heads": numbers.key_value_heads,
        "head_dim": numbers.head_size,
        "hidden_size": lambda config: numbers.number(config, "hidden_size", "n_embd"),
        "num_hidden_layers": numbers.layers,
        "vocab_size": lambda config: numbers.number(config, "vocab_size"),
    }
    pairs = {name: (_known(read, given), _known(read, own)) for name, read in numbers_of.items()}
    problems = [
        f"{name} is {one}, and SRC's is {two}"
        for name, (one, two) in pairs.items()
        if None not in (one, two) and one != two
    ]
    if problems:
        raise Mismatch(
            f"the config.json of --config is not that of SRC, which has its own: {'; '.join(problems)}; omit --config, "
            "or correct SRC's config.json"
        )


def _by_shapes(stored: Mapping[str, Spec], layers: Mapping[str, tuple[int, ...]], config: Config) -> Iterator[str]:
    """Yield what shapes contradict."""
    if _EMBEDDING in stored:
        rows, width = stored[_EMBEDDING].shape
        yield from _differ("hidden_size", _known(lambda c: numbers.number(c, "hidden_size", "n_embd"), config), width)
        vocabulary = _known(lambda c: numbers.number(c, "vocab_size"), config)
        if vocabulary is not None and vocabulary > rows:
            yield f"vocab_size is {vocabulary}, and the checkpoint's embedding has {rows} rows"
    count = _layer_count(stored)
    if count:
        yield from _differ("num_hidden_layers", _known(numbers.layers, config), count)
    heads, kv_heads, size = (
        _known(read, config) for read in (numbers.heads, numbers.key_value_heads, numbers.head_size)
    )
    if heads is None or kv_heads is None or size is None or _QKV not in layers:
        return
    if _QUERY_NORM in layers:
        yield from _differ("head_dim", size, layers[_QUERY_NORM][-1])
    if _PROJECTION in layers:
        queries = layers[_PROJECTION][-1]
        keys = (layers[_QKV][-2] - queries) // 2
        yield from _differ(f"num_attention_heads x head_dim, {heads} x {size},", heads * size, queries)
        yield from _differ(f"num_key_value_heads x head_dim, {kv_heads} x {size},", kv_heads * size, keys)


def _by_args(layers: Mapping[str, tuple[int, ...]], args: Any, config: Config) -> Iterator[str]:
    """Yield what Megatron's args contradict. Shapes tell the numbers that are not compared here."""
    if not _heads_in(args):
        return
    yield from _differ("num_attention_heads", _known(numbers.heads, config), args["num_attention_heads"])
    vocabulary, tokens = _known(lambda c: numbers.number(c, "vocab_size"), config), args.get("vocab_size")
    if vocabulary is not None and type(tokens) is int and vocabulary < tokens:
        yield f"vocab_size is {vocabulary}, and the checkpoint's args have {tokens}, which would lose tokens"
    if _QKV not in layers:
        return  # latent attention has key-value heads and head sizes of its own
    groups = args.get("num_query_groups") if args.get("group_query_attention") else args["num_attention_heads"]
    if type(groups) is int:
        yield from _differ("num_key_value_heads", _known(numbers.key_value_heads, config), groups)
    if type(args.get("kv_channels")) is int:
        yield from _differ("head_dim", _known(numbers.head_size, config), args["kv_channels"])


def _differ(name: str, given: int | None, found: int) -> Iterator[str]:
    if given is not None and given != found:
        yield f"{name} is {given}, and the checkpoint has {found}"


def _heads_in(args: Any) -> bool:
    return isinstance(args, dict) and type(args.get("num_attention_heads")) is int


def _known(read: Callable[[Config], int], config: Config) -> int | None:
    try:
        return read(config)
    except MissingNumber:
        return None


def _layer_shapes(stored: Mapping[str, Spec]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights by their names in it; layers differ in no compared one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for key, spec in stored.items():
        match = _LAYER.fullmatch(key)
        if match is not None:
            shapes.setdefault(match["name"], tuple(spec.shape))
    return shapes


def _layer_count(stored: Mapping[str, Spec]) -> int:
    """Return the number of layers: the highest one's, or the first dim of weights that hold all layers."""
    count = 0
    for key, spec in stored.items():
        match = _LAYER.fullmatch(key)
        if match is not None and match["number"] is not None:
            count = max(count, int(match["number"]) + 1)
        elif match is not None and match["name"] == _QKV:
            count = max(count, spec.shape[0])
    return count
