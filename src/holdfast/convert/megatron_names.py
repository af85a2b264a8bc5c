"""Megatron's names of weights: recognized, and the built-in mapping that gives the hub's, or why there is none."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.mapping import families

_LAYER = r"(?:.*\.)?(?:decoder|encoder)\.layers\.(?:[0-9]+\.)?"
_ATTENTION = re.compile(_LAYER + r"self_attention\.linear_qkv\..+")
_LATENT = re.compile(_LAYER + r"self_attention\.linear_(?:q|q_down|q_up|kv_down|kv_up)_proj\..+")
_MAMBA = re.compile(_LAYER + r"mixer\.in_proj\..+")
_OLD = re.compile(r"(?:.*\.)?language_model\.(?:encoder|transformer)\.layers\.[0-9]+\.\w+\.query_key_value\..+")
_KINDS = (_ATTENTION, _LATENT, _MAMBA, _OLD)

_STACKED = re.compile(r"decoder\.layers\.[a-z].+")
_LOCAL = re.compile(r"decoder\.layers\.[0-9]+\.input_layernorm\.weight")
_LOCAL_LATENT = re.compile(r"decoder\.layers\.[0-9]+\.self_attention\.kv_layernorm\.weight")

_HUB = re.compile(r"(?:model\.)?layers\.[0-9]+\.self_attn\.[a-z_]+_proj\.weight|(?:transformer\.)?h\.[0-9]+\.attn\..+")

_OWN_MAPPING = "write the mapping as statements (--map FILE), or export the model with Megatron's own tools"


def has_megatron_names(keys: Iterable[str]) -> bool:
    """Return True for the keys of a Megatron model, which transformers opens with initial values."""
    return any(kind.fullmatch(key) for key in keys for kind in _KINDS)


def has_hub_names(keys: Iterable[str]) -> bool:
    """Return True for the keys of a model of the families as the hub has them."""
    return any(_HUB.fullmatch(key) for key in keys)


def mapping_hint(keys: Collection[str], config: Mapping[str, Any] | None, *, has_args: bool = False) -> str:
    """Return which mapping gives the hub's names to the keys of a Megatron model, or that none does.

    With Megatron's args, a missing config.json can be made of them.
    """
    if _any(_OLD, keys):
        return (
            "no built-in mapping has the names of Megatron before Megatron-Core: convert them with "
            "tools/checkpoint/convert.py --loader legacy --saver core of Megatron-Core 0.12, or write the "
            "mapping as statements (--map FILE)"
        )
    if _any(_MAMBA, keys):
        return f"no built-in mapping has Mamba layers: {_OWN_MAPPING}"
    variant = _variant(keys)
    known = [family for family in families.FAMILIES if variant in family.programs]
    if _any(_LATENT, keys):
        known = [family for family in known if family.name.startswith("deepseek")]
        if not known:
            return f"no built-in mapping has latent attention with all layers in one tensor: {_OWN_MAPPING}"
    if config is None:
        hint = f"did you mean --map from-{variant} --config FOLDER, the folder of the model's config.json?"
        made = f"if there is none, --map {known[0].name}-from-{variant} --config from-args makes it of the run's args"
        return f"{hint} {made}" if has_args else hint
    try:
        family = families.family_of(config)
    except InvalidArgument as error:
        return f"{error} (--map FILE)"
    if family not in known:
        return f"no built-in mapping of {family.name} has these names: {_OWN_MAPPING}"
    return f"did you mean --map {family.name}-from-{variant}?"


def _variant(keys: Collection[str]) -> str:
    """Return the variant of the built-in mappings that has names like these."""
    if _any(_STACKED, keys):
        return "megatron-dist"
    if any(".mlp.experts.experts." in key for key in keys):
        return "megatron-dist-layers"
    if _any(_LOCAL_LATENT if _any(_LATENT, keys) else _LOCAL, keys):
        return "megatron-local"
    return "megatron"


def _any(kind: re.Pattern[str], keys: Collection[str]) -> bool:
    return any(kind.fullmatch(key) for key in keys)
