"""One case on one rank: the call on DTensors against the same call on one device."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.spmd.budget import budget
from tests.spmd.cases import Case, placements_of
from tests.spmd.table import Operation

WEIGHTS = (0.5, 0.25, 0.15, 0.1, 0.3, 0.2, 0.4, 0.35)  # of each rank's share in a Partial, as far as there are ranks
COLLECTIVES = ("_c10d_functional", "c10d", "_dtensor", "_c10d_functional_autograd")
THREAD = ThreadPoolExecutor(1)  # for the cases that are called in a second thread
RAISES_TOO = "as one device raises"
QUIET = ("wait_tensor", "_wrap_tensor_autograd")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rank found: `right`, `wrong` or `raise`, the bytes that it received, and those that it may."""

    outcome: str
    detail: str = ""
    bytes: int = 0
    allowed: int | None = (
        None  # None where the table says nothing: random numbers, strided shards, calls that must raise
    )
    digest: str = ""


class Listener(TorchDispatchMode):
    """Counts the bytes that collectives move to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in COLLECTIVES and func._opname not in QUIET:
            self.bytes += _wire(func._opname, args)
        return func(*args, **(kwargs or {}))


def _wire(name: str, args: Any) -> int:
    """What a rank receives in a collective, as rings do it."""
    given = sum(leaf.nbytes for leaf in _tensors(args))
    group = next((value for value in reversed(args) if isinstance(value, str)), None)
    ranks = dist.distributed_c10d._resolve_process_group(group).size() if group else dist.get_world_size()
    if "gather" in name:
        return given * (ranks - 1)
    return given * (ranks - 1) // ranks * (2 if "reduce" in name and "scatter" not in name else 1)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _tensors(item)]
    return []


def place(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """This rank's share of a tensor that every rank has, without any communication."""
    local = whole
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            local = placement._split_tensor(local, mesh.size(axis), with_padding=False)[0][coordinate[axis]]
        elif isinstance(placement, Shard):
            chunks = list(torch.chunk(local, mesh.size(axis), dim=placement.dim)) if local.shape[placement.dim] else []
            empty = local.narrow(placement.dim, 0, 0)
            local = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else empty
        elif isinstance(placement, Partial):
            local = _partial(local, coordinate[axis], mesh.size(axis), str(placement.reduce_op))
    stride = _laid_as(whole, whole).stride()
    return DTensor.from_local(
        _laid_as(local, whole), mesh, placements, run_check=False, shape=whole.shape, stride=stride
    )


def _partial(whole: torch.Tensor, rank: int, ranks: int, how: str) -> torch.Tensor:
    """One rank's part of a tensor that all parts together sum, average or compare to; no two parts are alike."""
    if how in ("sum", "avg"):
        return whole * (WEIGHTS[rank] / sum(WEIGHTS[:ranks]) * (ranks if how == "avg" else 1))
    places = torch.arange(whole.numel(), device=whole.device).reshape(whole.shape)
    worse = -1.0 - rank if how == "max" else 1.0 + rank
    return torch.where(places % ranks == rank, whole, whole + worse)


def _laid_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A copy without gaps, whose dims lie in memory in the order of another's."""
    order = sorted(range(tensor.ndim), key=lambda dim: -other.stride(dim))
    back = sorted(range(tensor.ndim), key=order.__getitem__)
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, column by column."""
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor


def judge(case: Case, operation: Operation, mesh: DeviceMesh, other: DeviceMesh) -> Verdict:
    """Run one case; never raises. `other` is the mesh of all but the first input where a case has two."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.operation} {case.size}".encode()))
    wholes = [given.make(case.size, generator).to(mesh.device_type) for given in operation.inputs]
    if case.laid == "columns":
        wholes = [_turned(whole) for whole in wholes]
    _seed()
    expected, failure = _expected(operation, wholes)
    placements = placements_of(case, operation)
    listener = Listener()
    try:
        _seed()
        found = _found(case.way, operation, wholes, placements, (mesh, other), listener)
    except Exception as error:  # noqa: BLE001 - any error is a finding
        if failure is not None and failure.startswith(f"{type(error).__name__}:"):
            return Verdict("right", RAISES_TOO, listener.bytes)
        if failure is not None:
            return Verdict("wrong", f"one device raises {failure}, but this {type(error).__name__}: {error}")
        return Verdict("raise", f"{type(error).__name__}: {str(error)[:300]}")
    if failure is not None:
        return Verdict("wrong", f"one device raises {failure}, but this did not")
    if operation.random:
        return _judge_random(found, expected, listener.bytes)
    problem = _difference(found, expected, operation.tolerance)
    allowed = budget(case, operation) if case.shards == "plain" else None
    return Verdict("wrong", problem) if problem else Verdict("right", "", listener.bytes, allowed)


def _seed() -> None:
    """Begin the random numbers again; torch.manual_seed would also look up where it was called from."""
    torch.default_generator.manual_seed(7)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(7)


def _leaves(operation: Operation, wholes: list[Any]) -> list[Any]:
    return [
        whole.detach().requires_grad_(operation.grad and given.is_float and given.kind not in ("constant", "variance"))
        for given, whole in zip(operation.inputs, wholes, strict=True)
    ]


def _expected(operation: Operation, wholes: list[torch.Tensor]) -> tuple[list[torch.Tensor | None], str | None]:
    leaves = _leaves(operation, wholes)
    try:
        outputs = _tensors(operation.call(*leaves))
        return [*outputs, *_gradients(operation, outputs, leaves, None)], None
    except Exception as error:  # noqa: BLE001 - any error is a finding
        return [], f"{type(error).__name__}: {error}"


def _found(
    way: str,
    operation: Operation,
    wholes: list[torch.Tensor],
    placements: list[tuple[Placement, ...] | None],
    meshes: tuple[DeviceMesh, DeviceMesh],
    listener: Listener,
) -> list[torch.Tensor | None]:
    mesh = meshes[0]
    inputs = _placed(wholes, placements, meshes if way == "meshes" else (mesh, mesh))
    leaves = _leaves(operation, inputs)
    call: Callable[..., Any] = operation.call
    counting: contextlib.AbstractContextManager[Any] = listener
    if way == "traced":
        _trace(operation, inputs, mesh)
    elif way == "compiled":
        call = _compiled(_with_uses(call), "aot_eager")
        counting = contextlib.nullcontext()  # dynamo leaves modes alone

    def results() -> list[torch.Tensor | None]:
        with counting:
            outputs = _tensors(call(*leaves))
            gradients = _gradients(operation, outputs, leaves, mesh)
        return [_whole(value) for value in (*outputs, *gradients)]

    return THREAD.submit(results).result() if way == "thread" else results()


def _placed(
    wholes: list[torch.Tensor],
    placements: list[tuple[Placement, ...] | None],
    meshes: tuple[DeviceMesh, DeviceMesh],
) -> list[Any]:
    """Every input on the first mesh, but the second one placed on the other, its placements cut or filled to fit."""
    inputs: list[Any] = []
    count = 0
    for whole, places in zip(wholes, placements, strict=True):
        if places is None:
            inputs.append(whole)
            continue
        mesh = meshes[1] if count == 1 else meshes[0]
        count += 1
        fitting = (*places, *(Replicate() for _ in range(mesh.ndim)))[: mesh.ndim]
        inputs.append(place(whole, mesh, fitting))
    return inputs


def _with_uses(call: Callable[..., Any]) -> Callable[..., Any]:
    """Use every result within the region: what has left the graph comes back into it."""

    def used(value: Any) -> Any:
        return value * 1 if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return lambda *inputs: tree_map(used, call(*inputs))


def _compiled(call: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(call, backend=backend)


def _trace(operation: Operation, inputs: list[Any], mesh: DeviceMesh) -> None:
    """Let torch.compile see the call, forward and backward, before it is made."""
    leaves = _leaves(operation, [value.clone() for value in inputs])
    with contextlib.suppress(Exception):  # what cannot be traced leaves nothing behind
        outputs = _tensors(_compiled(operation.call, "eager")(*leaves))
        _gradients(operation, outputs, leaves, mesh)
    _seed()


def _gradients(operation: Operation, outputs: list[Any], leaves: list[Any], mesh: Any) -> list[Any]:
    if not operation.grad:
        return []
    live = [output for output in outputs if output.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    cotangents = []
    for position, output in enumerate(live):
        generator = torch.Generator().manual_seed(100 + position)
        whole = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype).to(output.device)
        if isinstance(output, DTensor):
            places = [p if isinstance(p, Shard) else Replicate() for p in output.placements]
            whole = place(whole, output.device_mesh, tuple(places))
        cotangents.append(whole)
    if not live:
        return []
    return list(torch.autograd.grad(live, wanted, cotangents, allow_unused=True))


def _whole(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def _difference(found: list[Any], expected: list[Any], tolerance: float = 1e-8) -> str:
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    for position, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if (ours is None) != (theirs is None):
            if ours is None and not theirs.any():
                continue
            if theirs is None and not ours.any():
                continue
            return f"result {position}: {'none' if ours is None else 'some'}"
        if ours is None:
            continue
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"result {position}: {tuple(ours.shape)} {ours.dtype}, not {tuple(theirs.shape)} {theirs.dtype}"
        if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance / 10, equal_nan=True):
            gap = (ours.to(torch.float64) - theirs.to(torch.float64)).abs().max()
            return f"result {position} is off by {float(gap):.3g}"
    return ""


def _judge_random(found: list[Any], expected: list[Any], moved: int) -> Verdict:
    (ours,), (theirs,) = found, expected
    if ours.shape != theirs.shape:
        return Verdict("wrong", f"shape {tuple(ours.shape)}")
    drawn = ours[ours != 0]
    if drawn.unique().numel() != drawn.numel():
        return Verdict("wrong", "shards drew the same numbers")
    digest = hashlib.sha256(ours.contiguous().numpy().tobytes()).hexdigest()
    return Verdict("right", "", moved, digest=digest)
