"""Orientation of Paddle's linear weights: inferred from shapes or stated, [in, out] transposed to the hub's.

The shape of a weight that is not square reveals its orientation if one side is the model's width. Square weights
follow the other weights. An unknown orientation is an error for a Hugging Face folder, and a note for other formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.convert.sinks.paddle import is_linear
from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.mapping import families
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe

IN_OUT, OUT_IN = "in-out", "out-in"
PADDLE_FORMATS = (
    "paddle unified checkpoint",
    "paddle flex checkpoint",
    "paddle state dicts",
    "paddle inference params",
)
_FURTHER_TYPES = frozenset({"mistral", "qwen2_moe"})  # these use the hub's names and the families' kinds of weights
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|score|classifier)\.weight")
_EXPERT = re.compile(r"(?:.*\.)?experts\.[0-9]+\.w[123]\.weight")  # Mixtral's names
_FROM_HIDDEN = re.compile(
    r"(?:q|k|v|qkv|gate|up|gate_up|up_gate|q_a)_proj|kv_a_proj_with_mqa|gate|shared_expert_gate|in_proj_(?:ba|qkvz)|w1|w3"
)
_TO_HIDDEN = re.compile(r"(?:o|down|eh)_proj|w2")
_REPRESENTATIVE = re.compile(r"(?:q|k|v|o|gate|up|down|q_a)_proj|kv_a_proj_with_mqa")  # the other weights follow these
_FROM_RANK = {"q_b_proj": "q_lora_rank", "kv_b_proj": "kv_lora_rank"}
_NOT_LINEAR = re.compile(r"embed|\bwte\b|\bwpe\b|position|norm|rotary|inv_freq|bias", re.IGNORECASE)
_OTHER_WIDTH = re.compile(r"visual|vision|audio", re.IGNORECASE)
_DIGITS = re.compile(r"[0-9]+")
_WAY_OUT = "give their order with --linear-weights in-out or out-in, or a mapping with --map"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Orientation:
    """The keys of a model to transpose. `unclear` is the reason if the orientation of some weights is unknown."""

    in_out: frozenset[str]
    unclear: str | None = None


def is_known(config: Mapping[str, Any] | None) -> bool:
    """Return True if a config names an architecture with the hub's weights and key names."""
    if config is None or config.get("model_type") in _FURTHER_TYPES:
        return config is not None
    try:
        return families.family_of(config).name != "gpt2"  # its linear weights are [in, out] on the hub, too
    except InvalidArgument:
        return False


def infer_orientation(shapes: Mapping[str, Shape], config: Mapping[str, Any], stored: str | None) -> Orientation:
    """Infer which weights of a model are [in, out].

    `stored` is the default for weights with ambiguous shapes: "in-out", "out-in" or None for unknown.
    """
    linears = {key for key, shape in shapes.items() if len(shape) == 2 and _is_linear(key)}
    inferred = _by_role(shapes, linears, config)
    votes = {inferred[role] for role in inferred if _REPRESENTATIVE.fullmatch(_module(role))}
    if len(votes) == 2:
        first = {
            vote: next(r for r, v in inferred.items() if v is vote and _REPRESENTATIVE.fullmatch(_module(r)))
            for vote in votes
        }
        return Orientation(frozenset(), f"{first[True]} is [in, out] by its shape, but {first[False]} is [out, in]")
    default = votes.pop() if votes else {IN_OUT: True, OUT_IN: False, None: None}[stored]
    in_out = {key for key in linears if inferred.get(_role(key), default) is True}
    is_ambiguous = any(
        len(shape) == 2 and _role(key) not in inferred and not _NOT_LINEAR.search(key) for key, shape in shapes.items()
    )
    if default is None and is_ambiguous:
        return Orientation(
            frozenset(in_out), "no weight's shape shows whether linear weights are [in, out] or [out, in]"
        )
    return Orientation(frozenset(in_out), _unclear(shapes, linears, inferred) if default else None)


def _is_linear(key: str) -> bool:
    return is_linear(key) or _HEAD.fullmatch(key) is not None or _EXPERT.fullmatch(key) is not None


def _unclear(shapes: Mapping[str, Shape], linears: set[str], inferred: Mapping[str, bool]) -> str | None:
    """Return a message about the first weight of an [in, out] model that may or may not be a linear one."""
    for key in sorted(shapes):
        if _HEAD.fullmatch(key) and key in linears and _role(key) not in inferred:
            return f"{key} is square, and Paddle's versions differ in how they store it"
        if len(shapes[key]) == 2 and key not in linears and not _NOT_LINEAR.search(key):
            return f"{key} {list(shapes[key])} may or may not be the weight of a linear layer"
        if len(shapes[key]) == 3 and re.search(r"experts|_proj", key):
            return f"{key} {list(shapes[key])} may or may not contain weights of linear layers"
    return None


def _by_role(shapes: Mapping[str, Shape], linears: set[str], config: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether each kind of weight is [in, out], for the kinds whose shapes show it."""
    widths = _widths(shapes, config)
    out: dict[str, bool] = {}
    for key in sorted(linears):
        if _OTHER_WIDTH.search(key) or shapes[key][0] == shapes[key][1]:
            continue
        first, last = _is_width(key, shapes[key][0], widths, config), _is_width(key, shapes[key][1], widths, config)
        to_hidden = _TO_HIDDEN.fullmatch(_module(key)) is not None
        if first is None or last is None or first == last:
            continue
        is_in_out = last if to_hidden else first
        if out.setdefault(_role(key), is_in_out) != is_in_out:
            raise Unsupported(f"{key}: its shape implies another orientation than the same weight in other layers")
    return out


def _is_width(key: str, size: int, widths: set[int], config: Mapping[str, Any]) -> bool | None:
    """Return whether a size is the hidden or low-rank size of a weight; None if that size is unknown."""
    module = _module(key)
    if module in _FROM_RANK:
        rank = config.get(_FROM_RANK[module])
        return size == rank if type(rank) is int else None
    if _FROM_HIDDEN.fullmatch(module) or _TO_HIDDEN.fullmatch(module) or _HEAD.fullmatch(key):
        return size in widths
    return None


def _widths(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> set[int]:
    """Return the width of the model from its config, else from its embedding."""
    inner = config.get("text_config")
    for fields in (config, inner if isinstance(inner, dict) else {}):
        if type(fields.get("hidden_size")) is int:
            return {fields["hidden_size"]}
    return {shape[1] for key, shape in shapes.items() if key.endswith("embed_tokens.weight") and len(shape) == 2}


def _module(key: str) -> str:
    return key.split(".")[-2] if "." in key else key


def _role(key: str) -> str:
    return _DIGITS.sub("*", key)


def transposed(contents: Contents, module: str, keys: frozenset[str]) -> Contents:
    """Transpose weights of a module, with their masters, averages and moments."""
    if not keys:
        return contents
    shapes = {key: contents.groups[module].tensors[key].shape for key in keys}
    return replace(contents, groups={name: _group(group, shapes) for name, group in contents.groups.items()})


def _group(group: Group, shapes: Mapping[str, Shape]) -> Group:
    def transpose(key: str, recipe: Recipe[Place]) -> Recipe[Place]:
        owner = key.rpartition("/")[0] if group.kind == "optimizer" else key
        return recipe.transposed() if shapes.get(owner) == recipe.shape else recipe

    if group.kind not in ("module", "masters", "optimizer"):
        return group
    return replace(group, tensors={key: transpose(key, recipe) for key, recipe in group.tensors.items()})


def stated_orientation(shapes: Mapping[str, Shape], config: Mapping[str, Any], stated: str) -> Orientation:
    """Return the weights to transpose for the order that the user states. Raises if shapes contradict it."""
    if stated not in (IN_OUT, OUT_IN):
        raise InvalidArgument(f"--linear-weights {stated}: expected {IN_OUT} or {OUT_IN}")
    linears = {key for key, shape in shapes.items() if len(shape) == 2 and _is_linear(key)}
    inferred = _by_role(shapes, linears, config)
    conflicts = [
        role
        for role, is_in_out in inferred.items()
        if _REPRESENTATIVE.fullmatch(_module(role)) and is_in_out != (stated == IN_OUT)
    ]
    if conflicts:
        raise Unsupported(f"--linear-weights {stated}: the shape of {conflicts[0]} implies the opposite order")
    if stated == OUT_IN:
        return Orientation(frozenset(key for key in linears if inferred.get(_role(key)) is True))
    others = {key for key, shape in shapes.items() if len(shape) == 2 and not _NOT_LINEAR.search(key)}
    return Orientation(frozenset(key for key in linears | others if inferred.get(_role(key)) is not False))


@dataclass(frozen=True, slots=True)
class OrientedContents:
    """Contents with the hub's order of linear weights, notes, and whether the hub's code can load them."""

    contents: Contents
    notes: tuple[str, ...] = ()
    ready: bool = True


def hub_oriented(
    contents: Contents, config: Mapping[str, Any] | None, form: str, stored: str | None, stated: str | None = None
) -> OrientedContents:
    """Return contents with linear weights in the hub's order.

    `stored` is the format's order for weights with ambiguous shapes, `stated` the user's order for all weights.
    Raises Unsupported if the order is unknown and a Hugging Face folder is requested.
    """
    model = contents.groups.get("model")
    if model is None or model.kind != "module":
        return OrientedContents(contents, ready=False)
    shapes = {key: recipe.shape for key, recipe in model.tensors.items()}
    fields = config or {}
    if stated is None:
        orientation = infer_orientation(shapes, fields, stored)
    else:
        orientation = stated_orientation(shapes, fields, stated)
    problem = orientation.unclear
    if problem is None and stated is None and orientation.in_out and not fields:
        problem = "no config.json names the architecture"
    if problem is not None and form == "hf":
        raise Unsupported(f"model: {problem}; linear weights are [out, in] on the hub; {_WAY_OUT}")
    notes: list[str] = []
    if problem is not None:
        notes.append(f"model: linear weights keep their stored order: {problem}; {_WAY_OUT}")
    elif orientation.in_out:
        count = len(orientation.in_out)
        notes.append(f"model: transposed {count} linear weights from [in, out] to [out, in], the hub's order")
        contents = transposed(contents, "model", orientation.in_out)
    known = is_known(config)
    if not known:
        architecture = fields.get("model_type") or fields.get("architectures") or "no architecture"
        notes.append(f"config.json names {str(architecture)[:80]}, whose key names may differ from the hub's")
    return OrientedContents(contents, tuple(notes), known and problem is None)


def is_in_out(contents: Contents, config: Mapping[str, Any] | None) -> bool:
    """Return True if the shapes of a model show that its linear weights are [in, out]."""
    model = contents.groups.get("model")
    if model is None or model.kind != "module":
        return False
    shapes = {key: recipe.shape for key, recipe in model.tensors.items()}
    return any(
        _REPRESENTATIVE.fullmatch(_module(key)) for key in infer_orientation(shapes, config or {}, OUT_IN).in_out
    )


def check_mapped(contents: Contents, config: Mapping[str, Any] | None) -> None:
    """Raise Unsupported if weights of a known architecture are [in, out] after a mapping."""
    model = contents.groups.get("model")
    if model is None or model.kind != "module" or not is_known(config):
        return
    shapes = {key: recipe.shape for key, recipe in model.tensors.items()}
    orientation = infer_orientation(shapes, config or {}, OUT_IN)
    if orientation.in_out or orientation.unclear:
        key = min(orientation.in_out, default="")
        raise Unsupported(
            f"model: after the mapping {key or orientation.unclear} is [in, out], but the hub expects [out, in]; omit "
            "the mapping, because known architectures are transposed automatically, or use one that fits the source"
        )
