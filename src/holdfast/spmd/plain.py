"""Plain tensors among DTensors, where they can only be indices, masks, or made by autograd: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import bind, replicated
from holdfast.spmd.empties import carry_out

INDEXING = (
    *("index.Tensor", "index_put.default", "index_put_.default", "_index_put_impl_.default", "masked_select.default"),
    *("masked_fill_.Scalar",),
    *("masked_scatter.default", "masked_scatter_.default", "scatter_add.default", "scatter_add_.default"),
    *("scatter.src", "scatter.value", "index_add.default", "index_copy.default", "index_select.default"),
    *("index_fill.int_Scalar", "index_fill.int_Tensor", "take.default", "put.default", "searchsorted.Tensor"),
    *("repeat_interleave.Tensor", "select_scatter.default", "slice_scatter.default", "diagonal_scatter.default"),
    *("_embedding_bag.default", "_embedding_bag_forward_only.default", "_embedding_bag_backward.default"),
)


def accept_plain(slow_path: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that takes plain tensors for replicated ones, and then goes the common way."""

    def handle(op: Any, args: Any, kwargs: Any) -> Any:
        mesh = bind(op, args, kwargs).mesh

        def placed(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(placed(item) for item in value)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                return replicated(value, mesh)
            return value

        args, kwargs = placed(tuple(args)), {name: placed(value) for name, value in kwargs.items()}
        info = private.unwrap(op, args, kwargs)
        sharding = slow_path(op, args, kwargs, info, True)
        if not private.is_decision(sharding):
            return sharding
        return carry_out(op, args, kwargs, info, sharding)

    return handle
