"""Give tensors of a live model other numbers of rows: plain tensors, DTensors, and parameters of FSDP2.

Every rank assembles the whole tensor, writes the new rows, and keeps its shard: the rows of a rank change with the
number of rows. The memory for one whole tensor is needed meanwhile.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast.core.errors import Unsupported
from holdfast.tokens.model_embeddings import VocabularyTensor


def reshard(model: nn.Module) -> None:
    """Make FSDP2 give its modules their shards: after a forward without a backward some have gathered copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor with memory of its own. Collective for a DTensor."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def with_rows(whole: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a whole tensor with more rows, which are zero."""
    if whole.shape[0] == rows:
        return whole
    return torch.cat([whole, whole.new_zeros((rows - whole.shape[0], *whole.shape[1:]))])


def placed_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, which every rank has, as `like` is placed."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def overwrite(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Write a whole tensor of the same shape into a live one, in place."""
    placed = placed_like(whole, tensor)
    with torch.no_grad():
        if isinstance(tensor, DTensor) and isinstance(placed, DTensor):
            tensor.to_local().copy_(placed.to_local())
        else:
            tensor.copy_(placed)


def replace_tensor(model: nn.Module, held: VocabularyTensor, whole: torch.Tensor) -> torch.Tensor:
    """Replace a parameter or buffer by a whole tensor of another shape, wherever it is registered.

    Returns the new one, sharded as the old one was.
    """
    old = held.tensor
    managed = _fsdp_param_of(model, old)
    if managed is not None:
        return _reshard(managed, old, whole)
    new = placed_like(whole, old)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        for _, module, name in held.places:
            module._parameters[name] = new
    else:
        for _, module, name in held.places:
            module._buffers[name] = new
    return new


def _fsdp_param_of(model: nn.Module, parameter: torch.Tensor) -> Any:
    """Return FSDP2's record of a sharded parameter, None without one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12 there may be several
            for group in [state._fsdp_param_group] if groups is None else groups:
                for managed in group.fsdp_params if group is not None else ():
                    if managed.sharded_param is parameter:
                        return managed
    return None


def _reshard(managed: Any, old: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Let FSDP2 shard a parameter anew, as fully_shard does: its buffers depend on the shape."""
    if managed.offload_to_cpu:
        raise Unsupported("tokens cannot be added to parameters that FSDP2 offloads to the CPU: add them before")
    dim = managed.fsdp_placement.dim
    before = whole
    inner = getattr(managed, "_unsharded_dtensor_spec", None) or getattr(managed, "_tp_spec", None)  # torch 2.11
    if inner is not None:  # tensor parallelism sharded the parameter before FSDP2 did
        before = distribute_tensor(whole, inner.mesh, inner.placements, src_data_rank=None)
    parameter = nn.Parameter(before, requires_grad=old.requires_grad)
    shard = managed._init_sharded_param
    meshes = [managed.mesh_info] if "mesh_info" in inspect.signature(shard).parameters else []
    shard(parameter, managed.device, lambda _: Shard(dim), *meshes)
    if managed.post_forward_mesh_info is not None:
        managed._init_sharded_post_forward_param_metadata(parameter)
    managed.all_gather_outputs = []
    if hasattr(managed, "_unsharded_param"):
        del managed._unsharded_param
    new: torch.Tensor = managed.sharded_param
    return new
