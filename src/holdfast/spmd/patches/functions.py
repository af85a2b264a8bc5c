"""Replaced functions of torch.nn.functional: instance_norm, circular pad, attention masks, plain loss targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.spmd.base.patched_function import PatchedFunction
from holdfast.spmd.base.torch_dispatch import in_loss_parallel
from holdfast.spmd.sharding.local_parts import replicated
from holdfast.spmd.sharding.shard_sizes import is_shard


def _instance_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run instance_norm without running statistics as group_norm with one group per channel, which keeps shards.

    torch flattens batch and channels into one dim, for which either would be gathered. If only space is sharded,
    torch's function is kept: its batch_norm keeps the shards.
    """

    def instance_norm(
        input: Any,  # noqa: A002 - torch's own name for it
        running_mean: Any = None,
        running_var: Any = None,
        weight: Any = None,
        bias: Any = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        plain = running_mean is None and running_var is None and use_input_stats
        fits = isinstance(input, DTensor) and plain and input.ndim >= 3 and input.shape[2:].numel() != 1
        if not fits or _only_space(input):
            return original(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        return F.group_norm(input, input.shape[1], weight, bias, eps)

    return instance_norm


def _only_space(tensor: DTensor) -> bool:
    """Return True if only spatial dims are sharded and no placement is Partial."""
    placed = [place for place in tensor.placements if not place.is_replicate()]
    return bool(placed) and all(is_shard(place) and place.dim >= 2 for place in placed)


def _pad(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run circular padding as a cat of slices: torch copies them into a new tensor, which has no shards."""

    def pad(
        input: Any,  # noqa: A002 - torch's own name for it
        pad: Sequence[int],
        mode: str = "constant",
        value: float | None = None,
    ) -> Any:
        if mode != "circular" or not isinstance(input, DTensor) or not _is_circular(input, pad):
            return original(input, pad, mode, value)
        for place in range(len(pad) // 2):
            dim = input.ndim - 1 - place
            before, after, size = pad[2 * place], pad[2 * place + 1], input.shape[dim]
            ends = [input.narrow(dim, size - before, before)] if before else []
            starts = [input.narrow(dim, 0, after)] if after else []
            input = torch.cat([*ends, input, *starts], dim) if ends or starts else input
        return input

    return pad


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accept masks that are plain: bool masks, and the causal mask that torch makes without a fused kernel."""

    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        if (
            is_causal
            and attn_mask is None
            and isinstance(query, DTensor)
            and not _is_fused(query, key, value, dropout_p)
        ):
            earlier = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
            attn_mask, is_causal = replicated(earlier, query.device_mesh), False
        elif isinstance(query, DTensor) and _is_plain(attn_mask, torch.bool):
            attn_mask = replicated(attn_mask, query.device_mesh)
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)

    return scaled_dot_product_attention


def _is_plain(value: Any, *dtypes: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dtype in dtypes


def _is_fused(query: DTensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> bool:
    """Return True if a fused kernel of torch handles causal masks: 4 dims, the last one contiguous.

    CPUs have none with dropout, GPUs none for float64.
    """
    regular = query.ndim == key.ndim == value.ndim == 4 and query.shape[-1] == value.shape[-1]
    regular = regular and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    return regular and (not dropout_p if query.device.type == "cpu" else query.dtype != torch.float64)


def _is_circular(tensor: DTensor, pad: Sequence[int]) -> bool:
    """Return True if torch accepts these paddings (from 0 to the dim's length) and the padded dims are whole."""
    sizes = [tensor.shape[tensor.ndim - 1 - place // 2] for place in range(len(pad))]
    known = len(pad) % 2 == 0 and len(pad) == 2 * (tensor.ndim - 2) and len(pad) > 0
    padded = {tensor.ndim - 1 - place // 2 for place, length in enumerate(pad) if length}
    cut = any(is_shard(place) and place.dim in padded for place in tensor.placements)
    return known and not cut and all(0 <= length <= size for length, size in zip(pad, sizes, strict=True))


def _with_targets(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accept plain targets in cross_entropy and nll_loss: like indices, they are equal on every rank."""

    def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 - torch's own name for it
        plain = isinstance(target, torch.Tensor) and not isinstance(target, DTensor)
        if plain and isinstance(input, DTensor) and not target.is_floating_point():
            target = replicated(target, input.device_mesh)
        result = original(input, target, *args, **kwargs)
        return _reduced_over_classes(result, input) if in_loss_parallel() else result

    return loss


def _with_lengths(original: Callable[..., Any]) -> Callable[..., Any]:
    """Accept plain targets and lengths in ctc_loss: like indices, they are equal on every rank."""

    def ctc_loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
    ) -> Any:
        arguments = [targets, input_lengths, target_lengths]
        if isinstance(log_probs, DTensor):
            mesh = log_probs.device_mesh
            arguments = [
                replicated(item, mesh) if _is_plain(item, torch.int64, torch.int32) else item for item in arguments
            ]
        return original(log_probs, *arguments, *args, **kwargs)

    return ctc_loss


def _reduced_over_classes(loss: Any, scores: Any) -> Any:
    """Reduce over the classes, as loss_parallel promises; label smoothing leaves a Partial there."""
    if not isinstance(loss, DTensor) or not isinstance(scores, DTensor):
        return loss
    classes = Shard(min(1, scores.ndim - 1))
    pairs = zip(loss.placements, scores.placements, strict=True)
    places = [Replicate() if here.is_partial() and there == classes else here for here, there in pairs]
    return loss.redistribute(placements=places)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cross_entropy": _with_targets,
    "ctc_loss": _with_lengths,
    "instance_norm": _instance_norm,
    "nll_loss": _with_targets,
    "pad": _pad,
    "scaled_dot_product_attention": _attention,
}
WHY = {
    "cross_entropy": "torch refuses plain targets",
    "ctc_loss": "torch refuses plain targets and lengths",
    "nll_loss": "torch refuses plain targets",
    "instance_norm": "torch flattens batch and channels into one dim, for which either is gathered",
    "pad": "torch copies circular pads into a new tensor, which has no shards",
    "scaled_dot_product_attention": "torch refuses plain masks, also the one that it makes for causal attention",
}


def install_functions() -> list[PatchedFunction]:
    return [PatchedFunction(F, name, make) for name, make in FUNCTIONS.items()]
