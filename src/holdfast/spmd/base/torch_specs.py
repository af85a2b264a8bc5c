"""DTensors and their specs: make and wrap, local tensors, replaced contents, redistribution, this rank's box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from holdfast.spmd.base import torch_versions
from holdfast.spmd.base.torch_modes import is_tracing, refuse_rank_in_shared_graph, simulates_ranks
from holdfast.spmd.base.torch_versions import is_torch_2_11

REPLICATE = Replicate()
HALF_DTYPES = (torch.float16, torch.bfloat16)


def spec_of(tensor: DTensor) -> Any:
    return tensor._spec


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return the rank's local tensor, outside of autograd."""
    return tensor._local_tensor


def storage_id(tensor: torch.Tensor) -> int:
    """Identify the storage of a tensor's local values: equal for a tensor and its detach(), empty shards included."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Any:
    meta = torch_versions.TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return torch_versions.DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def specs_in(values: Any) -> list[Any]:
    """Return every spec in nested arguments or results."""
    kind = torch_versions.DTensorSpec
    leaves = torch_versions.tree_leaves(values, is_leaf=lambda item: isinstance(item, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def uncached_spec(spec: Any) -> Any:
    """Return the spec; on torch 2.11, which ignores subclasses, one that the dispatcher's cache never matches."""
    if not is_torch_2_11():
        return spec
    return torch_versions.UncachedSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)


def cacheable_spec(spec: Any) -> Any:
    """Return the spec that `uncached_spec` was given."""
    if not is_torch_2_11():
        return spec
    return torch_versions.DTensorSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)


def wrap(local: torch.Tensor, spec: Any) -> DTensor:
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def wrap_as(kind: type, local: torch.Tensor, spec: Any) -> Any:
    """Wrap a local tensor as a subclass of DTensor."""
    return kind(local, spec, requires_grad=False)


def replace_contents(tensor: DTensor, local: torch.Tensor, placements: Sequence[Placement]) -> None:
    """Replace the local tensor and the placements of a DTensor, as an in-place call on a Partial must."""
    spec = make_spec(tensor.device_mesh, placements, tensor.shape, tensor.stride(), local.dtype)
    tensor._local_tensor = local
    tensor._spec = uncached_spec(spec) if isinstance(tensor._spec, torch_versions.UncachedSpec) else spec


def take_contents(tensor: DTensor, local: torch.Tensor, spec: Any) -> None:
    """Give a DTensor another local tensor and its spec, as an assignment to `.data` does."""
    tensor._local_tensor, tensor._spec = local, spec


def reshape_in_place(
    op: Any, tensor: DTensor, local: torch.Tensor, placements: Sequence[Placement], rest: tuple[Any, ...]
) -> None:
    """Run an operator that changes shape in place: on the wrapper itself, and with another local tensor."""
    with torch_versions.no_dispatch():
        op(tensor, *rest)
    tensor._local_tensor = local
    tensor._spec = make_spec(tensor.device_mesh, placements, tensor.shape, tensor.stride(), local.dtype)


def norms_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `redistribute_local_tensor` to reduce norms in half precision in float32, since their powers overflow."""

    def redistribute_local_tensor(local: torch.Tensor, present: Any, wanted: Any, **options: Any) -> torch.Tensor:
        has_norm = any(isinstance(place, torch_versions.NormPartial) for place in present.placements)
        if not has_norm or local.dtype not in HALF_DTYPES:
            return original(local, present, wanted, **options)  # type: ignore[no-any-return]
        specs = [_with_dtype(spec, torch.float32) for spec in (present, wanted)]
        moved: torch.Tensor = original(local.float(), *specs, **options)
        return moved.to(local.dtype)

    return redistribute_local_tensor


def _with_dtype(spec: Any, dtype: torch.dtype) -> Any:
    meta = spec.tensor_meta
    return spec if meta is None else make_spec(spec.mesh, spec.placements, meta.shape, meta.stride, dtype)


def local_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes and offsets of this rank's box of a tensor of `shape`; raises as `own_coordinate` does."""
    refuse_rank_in_shared_graph()
    # A trace would record the small tensors that torch computes the box with.
    with torch_versions.no_dispatch() if is_tracing() else nullcontext():
        box = torch_versions.compute_local_shape_and_global_offset(torch.Size(shape), mesh, tuple(placements))
    sizes, offsets = box
    if simulates_ranks() and not all(type(number) is int for number in (*sizes, *offsets)):
        raise RuntimeError(f"this process is not a single rank of {mesh}")
    return tuple(sizes), tuple(offsets)
