"""Signatures by batch and channel: adaptive pools, padding, grid_sample, upsample, linalg, cdist, pixel_shuffle.

Each line is a signature: a letter that several tensors share is sharded in all of them; `*` are dims that stay whole. A
result that lacks a sharded letter is a partial sum. A `+` marks linear arguments and their results, which may stay
Partial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_dispatch import global_outputs
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.local_parts import wrap
from holdfast.spmd.sharding.shard_sizes import chunk_sizes, is_shard, sharded_axes
from holdfast.spmd.sharding.signature import parse, run_sharded, signature_rule

LINES: dict[str, str] = {
    # pooling, padding and sampling of images: batch and channels
    "avg_pool3d_backward.default": "nc***, nc*** -> nc",
    "_adaptive_avg_pool2d_backward.default": "nc**, nc** -> nc",
    "_adaptive_avg_pool3d_backward.default": "nc***, nc*** -> nc",
    "adaptive_max_pool2d.default": "nc** -> nc, nc",
    "adaptive_max_pool2d_backward.default": "nc**, nc**, nc** -> nc",
    "adaptive_max_pool3d.default": "nc*** -> nc, nc",
    "adaptive_max_pool3d_backward.default": "nc***, nc***, nc*** -> nc",
    **{
        f"{kind}_pad{dims}d.default": f"nc{'*' * dims} -> nc"
        for kind in ("reflection", "replication")
        for dims in (1, 2, 3)
    },
    **{
        f"{kind}_pad{dims}d_backward.default": f"nc{'*' * dims}, nc{'*' * dims} -> nc"
        for kind in ("reflection", "replication")
        for dims in (1, 2, 3)
    },
    "grid_sampler_2d.default": "+nc**, n*** -> +nc",
    "grid_sampler_2d_backward.default": "nc**, nc**, n*** -> nc, n",
    "im2col.default": "n*** -> n",
    "col2im.default": "n** -> n",
    "channel_shuffle.default": "+n*hw -> +n*hw",
    # linear algebra of stacks of matrices: the stack
    "_linalg_eigh.default": "t** -> t, t",
    "linalg_qr.default": "t** -> t, t",
    "linalg_cholesky_ex.default": "t** -> t, t",
    "linalg_inv_ex.default": "t** -> t, t",
    "_linalg_svd.default": "t** -> t, t, t",
    "_linalg_det.default": "t** -> t, t, t",
    "_linalg_solve_ex.default": "t**, +t** -> +t, t, t, t",
    "linalg_lu_factor_ex.default": "t** -> t, t, t",
    "linalg_lu_solve.default": "t**, t*, +t** -> +t",
    "linalg_solve_triangular.default": "t**, +t** -> +t",
    # distances between rows
    "_cdist_forward.default": "n*, c* -> nc",
    "_cdist_backward.default": "nc, n*, c*, nc -> n",
}

# torch handles these, but gathers if a shard is empty
WHEN_EMPTY: dict[str, str] = {
    "avg_pool3d.default": "nc*** -> nc",
    "_adaptive_avg_pool2d.default": "nc** -> nc",
    "_adaptive_avg_pool3d.default": "nc*** -> nc",
    "bmm.default": "t**, t** -> t",
    "upsample_nearest1d.default": "nc* -> nc",
    "upsample_nearest2d.default": "nc** -> nc",
    "upsample_bilinear2d.default": "nc** -> nc",
    "upsample_bicubic2d.default": "nc** -> nc",
    "upsample_linear1d.default": "nc* -> nc",
}


def pixel_shuffle(call: Call) -> Any:
    """Keep batch shards and Partials; torch handles spatial shards, but raises if their bounds change."""
    tensor = call.values[0]
    up = "upscale_factor" in call.names
    factor = call["upscale_factor"] if up else 1 / call["downscale_factor"]
    partial = [place for place in tensor.placements if place.is_partial()]
    if tensor.ndim != 4 or not all(
        place.is_partial() or _moves_along(tensor, place, factor) for place in tensor.placements
    ):
        return USE_TORCH if tensor.ndim != 4 else run_sharded(call, parse("+n___ -> +n", call))
    if not partial:
        return USE_TORCH
    local = call.run({(0,): local_of(tensor)})
    return wrap(local, call.mesh, tensor.placements, global_outputs(call.info).shape)


def _moves_along(tensor: DTensor, place: Any, factor: float) -> bool:
    """Return True if every shard of a batch or spatial dim grows or shrinks by itself."""
    if not is_shard(place):
        return bool(place.is_replicate())
    if place.dim == 1:
        return False
    growth, size = (1 if place.dim == 0 else factor), tensor.shape[place.dim]
    before, after = [size], [round(size * growth)]
    for number in sharded_axes(tensor.placements, (place.dim,)):
        ranks = tensor.device_mesh.size(number)
        before, after = ([part for whole in sizes for part in chunk_sizes(whole, ranks)] for sizes in (before, after))
    return min(before) > 0 and [length * growth for length in before] == after


def _when_empty(text: str) -> Callable[[Call], Any]:
    run = signature_rule(text)
    return lambda call: run(call) if has_empty_input(call) else USE_TORCH


RULES = [
    *(
        Rule(
            "batched",
            (name,),
            f"the letters of {text}",
            "torch has no strategy, or gathers, or hangs when a shard is empty",
            signature_rule(text),
        )
        for name, text in LINES.items()
    ),
    Rule(
        "batched",
        ("pixel_shuffle.default", "pixel_unshuffle.default"),
        "batch; space where its shards are whole blocks",
        "torch raises in the backward of uneven shards",
        pixel_shuffle,
    ),
    *(
        Rule("batched", (name,), f"the letters of {text}", "torch gathers when a shard is empty", _when_empty(text))
        for name, text in WHEN_EMPTY.items()
    ),
]
