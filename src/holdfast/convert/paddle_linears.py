"""The orientation of Paddle's linear weights: [in, out] in its layers, [out, in] on the hub and sometimes in its files.

Sizes tell where a weight begins or ends at the model's width and is not square. A square weight goes as its likes do.
What cannot be told is refused where a Hugging Face folder is asked for, and said where it is not.
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
_FURTHER_TYPES = frozenset({"mistral", "qwen2_moe"})  # the hub's names, and no more kinds of weights than the families
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|score|classifier)\.weight")
_EXPERT = re.compile(r"(?:.*\.)?experts\.[0-9]+\.w[123]\.weight")  # as Mixtral calls them
_FROM_HIDDEN = re.compile(
    r"(?:q|k|v|qkv|gate|up|gate_up|up_gate|q_a)_proj|kv_a_proj_with_mqa|gate|shared_expert_gate|in_proj_(?:ba|qkvz)|w1|w3"
)
_TO_HIDDEN = re.compile(r"(?:o|down|eh)_proj|w2")
_LIKE_ALL = re.compile(r"(?:q|k|v|o|gate|up|down|q_a)_proj|kv_a_proj_with_mqa")  # what the others follow
_FROM_RANK = {"q_b_proj": "q_lora_rank", "kv_b_proj": "kv_lora_rank"}
_NEVER = re.compile(r"embed|\bwte\b|\bwpe\b|position|norm|rotary|inv_freq|bias", re.IGNORECASE)
_OTHER_WIDTH = re.compile(r"visual|vision|audio", re.IGNORECASE)
_DIGITS = re.compile(r"[0-9]+")
_WAY_OUT = "say how they are stored with --linear-weights in-out or out-in, or give a mapping with --map"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Orientation:
    """Which keys of a model have to be transposed; `unclear` says why it is not known of some or of all."""

    turned: frozenset[str]
    unclear: str | None = None


def is_known(config: Mapping[str, Any] | None) -> bool:
    """Return whether a config names an architecture whose weights and their names are known to be the hub's."""
    if config is None or config.get("model_type") in _FURTHER_TYPES:
        return config is not None
    try:
        return families.family_of(config).name != "gpt2"  # whose linear weights are [in, out] on the hub too
    except InvalidArgument:
        return False


def orientation_of(shapes: Mapping[str, Shape], config: Mapping[str, Any], stored: str | None) -> Orientation:
    """Return which weights of a model are [in, out].

    `stored` is what the format or the user says of weights whose sizes do not tell: "in-out", "out-in" or None.
    """
    linears = {key for key, shape in shapes.items() if len(shape) == 2 and _is_linear(key)}
    told = _by_role(shapes, linears, config)
    said = {told[role] for role in told if _LIKE_ALL.fullmatch(_module(role))}
    if len(said) == 2:
        first = {
            turned: next(r for r, t in told.items() if t is turned and _LIKE_ALL.fullmatch(_module(r)))
            for turned in said
        }
        return Orientation(frozenset(), f"{first[True]} is [in, out] by its shape, and {first[False]} is [out, in]")
    follow = said.pop() if said else {IN_OUT: True, OUT_IN: False, None: None}[stored]
    turned = {key for key in linears if told.get(_role(key), follow) is True}
    untold = any(len(shape) == 2 and _role(key) not in told and not _NEVER.search(key) for key, shape in shapes.items())
    if follow is None and untold:
        return Orientation(
            frozenset(turned), "no weight's shape tells whether linear weights are [in, out] or [out, in]"
        )
    return Orientation(frozenset(turned), _unclear(shapes, linears, told) if follow else None)


def _is_linear(key: str) -> bool:
    return is_linear(key) or _HEAD.fullmatch(key) is not None or _EXPERT.fullmatch(key) is not None


def _unclear(shapes: Mapping[str, Shape], linears: set[str], told: Mapping[str, bool]) -> str | None:
    """Return which weight of a model that is [in, out] may be a linear one or not."""
    for key in sorted(shapes):
        if _HEAD.fullmatch(key) and key in linears and _role(key) not in told:
            return f"{key} is square, and Paddle's versions differ in how they store it"
        if len(shapes[key]) == 2 and key not in linears and not _NEVER.search(key):
            return f"{key} {list(shapes[key])} may be the weight of a linear layer, or not"
        if len(shapes[key]) == 3 and re.search(r"experts|_proj", key):
            return f"{key} {list(shapes[key])} may hold weights of linear layers, or not"
    return None


def _by_role(shapes: Mapping[str, Shape], linears: set[str], config: Mapping[str, Any]) -> dict[str, bool]:
    """Return, for the same weight of all layers, whether it is [in, out], where a shape tells."""
    widths = _widths(shapes, config)
    out: dict[str, bool] = {}
    for key in sorted(linears):
        if _OTHER_WIDTH.search(key) or shapes[key][0] == shapes[key][1]:
            continue
        first, last = _is_width(key, shapes[key][0], widths, config), _is_width(key, shapes[key][1], widths, config)
        to_hidden = _TO_HIDDEN.fullmatch(_module(key)) is not None
        if first is None or last is None or first == last:
            continue
        turned = last if to_hidden else first
        if out.setdefault(_role(key), turned) != turned:
            raise Unsupported(f"{key}: its shape says another orientation than that of the same weight in other layers")
    return out


def _is_width(key: str, size: int, widths: set[int], config: Mapping[str, Any]) -> bool | None:
    """Return whether a size is the one at which a weight begins or ends; None where that size is not known."""
    module = _module(key)
    if module in _FROM_RANK:
        rank = config.get(_FROM_RANK[module])
        return size == rank if type(rank) is int else None
    if _FROM_HIDDEN.fullmatch(module) or _TO_HIDDEN.fullmatch(module) or _HEAD.fullmatch(key):
        return size in widths
    return None


def _widths(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> set[int]:
    """Return the width of the model: what its config says, else what its embedding has."""
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
    """Return contents with weights of a module transposed, and with them their masters, averages and moments."""
    if not keys:
        return contents
    shapes = {key: contents.groups[module].tensors[key].shape for key in keys}
    return replace(contents, groups={name: _group(group, shapes) for name, group in contents.groups.items()})


def _group(group: Group, shapes: Mapping[str, Shape]) -> Group:
    def turned(key: str, recipe: Recipe[Place]) -> Recipe[Place]:
        owner = key.rpartition("/")[0] if group.kind == "optimizer" else key
        return recipe.transposed() if shapes.get(owner) == recipe.shape else recipe

    if group.kind not in ("module", "masters", "optimizer"):
        return group
    return replace(group, tensors={key: turned(key, recipe) for key, recipe in group.tensors.items()})


def said_orientation(shapes: Mapping[str, Shape], config: Mapping[str, Any], said: str) -> Orientation:
    """Return which weights are transposed if the user says how they are stored; raises if shapes object."""
    if said not in (IN_OUT, OUT_IN):
        raise InvalidArgument(f"--linear-weights {said}: they are stored as {IN_OUT} or as {OUT_IN}")
    linears = {key for key, shape in shapes.items() if len(shape) == 2 and _is_linear(key)}
    told = _by_role(shapes, linears, config)
    against = [
        role for role, turned in told.items() if _LIKE_ALL.fullmatch(_module(role)) and turned != (said == IN_OUT)
    ]
    if against:
        raise Unsupported(
            f"--linear-weights {said}: the shape of {against[0]} says that it is stored the other way round"
        )
    if said == OUT_IN:
        return Orientation(frozenset(key for key in linears if told.get(_role(key)) is True))
    others = {key for key, shape in shapes.items() if len(shape) == 2 and not _NEVER.search(key)}
    return Orientation(frozenset(key for key in linears | others if told.get(_role(key)) is not False))


@dataclass(frozen=True, slots=True)
class Oriented:
    """Contents with linear weights as the hub has them, notes, and whether the hub's code is known to open them."""

    contents: Contents
    notes: tuple[str, ...] = ()
    ready: bool = True


def hub_oriented(
    contents: Contents, config: Mapping[str, Any] | None, form: str, stored: str | None, said: str | None = None
) -> Oriented:
    """Return contents with linear weights as the hub has them.

    `stored` is what the format says of weights whose sizes do not tell, `said` what the user says of all.
    Raises Unsupported where the orientation cannot be told and a Hugging Face folder is asked for.
    """
    model = contents.groups.get("model")
    if model is None or model.kind != "module":
        return Oriented(contents, ready=False)
    shapes = {key: recipe.shape for key, recipe in model.tensors.items()}
    fields = config or {}
    found = orientation_of(shapes, fields, stored) if said is None else said_orientation(shapes, fields, said)
    problem = found.unclear
    if problem is None and said is None and found.turned and not fields:
        problem = "there is no config.json that names the architecture"
    if problem is not None and form == "hf":
        raise Unsupported(f"model: {problem}; linear weights are [out, in] on the hub: {_WAY_OUT}")
    notes: list[str] = []
    if problem is not None:
        notes.append(f"model: linear weights are left as they are stored: {problem}; {_WAY_OUT}")
    elif found.turned:
        notes.append(f"model: {len(found.turned)} linear weights were [in, out] and are [out, in] now, as on the hub")
        contents = transposed(contents, "model", found.turned)
    known = is_known(config)
    if not known:
        named = fields.get("model_type") or fields.get("architectures") or "no architecture"
        notes.append(f"config.json names {str(named)[:80]}: whether its weights are named as on the hub is not known")
    return Oriented(contents, tuple(notes), known and problem is None)


def is_in_out(contents: Contents, config: Mapping[str, Any] | None) -> bool:
    """Return whether the shapes of a model say that its linear weights are [in, out]."""
    model = contents.groups.get("model")
    if model is None or model.kind != "module":
        return False
    shapes = {key: recipe.shape for key, recipe in model.tensors.items()}
    return any(_LIKE_ALL.fullmatch(_module(key)) for key in orientation_of(shapes, config or {}, OUT_IN).turned)


def check_mapped(contents: Contents, config: Mapping[str, Any] | None) -> None:
    """Raise Unsupported where a mapping leaves weights of a known architecture [in, out], or has turned them to it."""
    model = contents.groups.get("model")
    if model is None or model.kind != "module" or not is_known(config):
        return
    found = orientation_of({key: recipe.shape for key, recipe in model.tensors.items()}, config or {}, OUT_IN)
    if found.turned or found.unclear:
        key = min(found.turned, default="")
        raise Unsupported(
            f"model: after the mapping {key or found.unclear} is [in, out], and the hub has [out, in]: leave the "
            "mapping out, for known architectures are transposed by themselves, or take one that fits the source"
        )
