"""Options of an optimizer's param groups: encode as JSON (0-d tensors keep their bits), and decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.adapters.live_types import keep_typed, with_live_types
from holdfast.adapters.optimizer import group_options
from holdfast.adapters.tensors import raw_array
from holdfast.core.errors import Unsupported
from holdfast.format import statejson
from holdfast.format.dtypes import dtype_named


def option_groups(optimizer: Any, name: str, keys: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the param groups of an optimizer, given the keys of their parameters."""
    return [
        {"params": list(own), "options": encode_options(options, f"{name}.param_groups[{index}]")}
        for index, ((_, options), own) in enumerate(zip(group_options(optimizer), keys, strict=True))
    ]


def encode_options(options: Mapping[str, Any], path: str) -> Any:
    """Encode a param group's options; 0-d tensors such as a capturable learning rate keep their bits."""

    def claim(value: Any, where: str, keys: statejson.Keys) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if value.ndim:
            raise Unsupported(f"{where}: an option that is a tensor of shape {list(value.shape)} cannot be stored")
        array = raw_array(value.detach().cpu())
        return {"$option": [str(value.dtype).removeprefix("torch."), array.tobytes().hex()]}

    return statejson.encode(dict(options), path, claim)


def decode_options(options: Any, where: str) -> dict[str, Any]:
    """Decode the options that `encode_options` encoded; instances of classes become plain data."""
    return dict(with_live_types(decode_typed_options(options, where), {}))


def decode_typed_options(options: Any, where: str) -> dict[str, Any]:
    """Decode the options that `encode_options` encoded; classes are left open."""

    def make(tag: str, content: Any) -> Any:
        if tag != "$option":
            raise Unsupported(f"{where}: unknown tag {tag[:40]!r}")
        name, data = content
        dtype = getattr(torch, dtype_named(name).name)
        return torch.frombuffer(bytearray.fromhex(data), dtype=dtype)[0].clone()

    return dict(statejson.decode(options, where, make, keep_typed))
