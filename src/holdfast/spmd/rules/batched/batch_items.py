"""Operators that treat the items of a batch, and often its channels, one by one.

Each line says the dims as letters: a letter that several tensors share is sharded in all of them together; `*` are
dims that every rank needs whole. A result that lacks a sharded letter is a sum over its shards. A `+` stands before
what the operator is linear in, and before its results: there a Partial may stay one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, is_shard, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.empty_shards import has_empty
from holdfast.spmd.sharding.mesh_collectives import chunk_sizes, sharded_axes
from holdfast.spmd.sharding.signature import parse, run_sharded

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

# what torch does well unless a shard is empty: then it gathers
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


def rule_of(text: str) -> Callable[[Call], Any]:
    """The rule that a line says; other numbers of dims are left to torch."""
    words = [word.strip(" +") for word in text.partition("->")[0].split(",")]
    plain = text.replace("*", "_")

    def run(call: Call) -> Any:
        tensors = [tensor for _, tensor in call.spots()]
        if [tensor.ndim for tensor in tensors] != [len(word) for word in words] or not _helps(tensors, words):
            return run_sharded(call, parse(plain, call)) if "shuffle" in call.op._schema.name else LEAVE
        return run_sharded(call, parse(plain, call))

    return run


def pixel_shuffle(call: Call) -> Any:
    """Batch shards and parts of a sum; torch moves shards of space along, but raises where they are cut elsewhere."""
    tensor = call.values[0]
    up = "upscale_factor" in call.names
    factor = call["upscale_factor"] if up else 1 / call["downscale_factor"]
    partial = [place for place in tensor.placements if place.is_partial()]
    if tensor.ndim != 4 or not all(
        place.is_partial() or _moves_along(tensor, place, factor) for place in tensor.placements
    ):
        return LEAVE if tensor.ndim != 4 else run_sharded(call, parse("+n___ -> +n", call))
    if not partial:
        return LEAVE
    local = call.run({(0,): private.local_of(tensor)})
    return wrap(local, call.mesh, tensor.placements, private.global_outputs(call.info).shape)


def _moves_along(tensor: DTensor, place: Any, factor: float) -> bool:
    """Whether the shards of a dim of batch or space, by all the axes that cut it, grow or shrink each by itself."""
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
    run = rule_of(text)
    return lambda call: run(call) if has_empty(call) else LEAVE


def _helps(tensors: list[Any], words: list[str]) -> bool:
    """Whether some tensor is sharded along a letter."""
    return any(
        is_shard(place) and word[place.dim] != "*"
        for tensor, word in zip(tensors, words, strict=True)
        if isinstance(tensor, DTensor)
        for place in tensor.placements
    )


RULES = [
    *(
        Rule(
            "batched",
            (name,),
            f"the letters of {text}",
            "torch has no strategy, or gathers, or hangs when a shard is empty",
            rule_of(text),
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
