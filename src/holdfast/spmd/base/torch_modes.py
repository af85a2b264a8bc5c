"""Modes of a call: traces of torch.compile, graph breaks, simulated ranks; values and asserts on a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from holdfast.spmd.base import torch_versions


def is_tracing() -> bool:
    """Return True in a trace of torch.compile or export, where tensors have no values."""
    return bool(torch_versions._are_we_tracing())


def traces_for_all_ranks() -> bool:
    """Return True if one rank's graph runs on every rank (`torch.distributed.config.compile_on_one_rank`)."""
    return bool(getattr(sys.modules.get("torch.distributed.config"), "compile_on_one_rank", False))


def refuse_rank_in_shared_graph() -> None:
    """Leave the graph in a trace whose graph other ranks run too: nothing of this rank may be in it."""
    if is_tracing() and traces_for_all_ranks():
        raise torch_versions.UnsupportedFakeTensorException(
            "holdfast.spmd: the rule needs its rank, and compile_on_one_rank runs the graph on every rank"
        )


def can_be_read(tensor: torch.Tensor) -> bool:
    """Return True if the values of a tensor can be read now: neither in a trace nor on a GPU."""
    return tensor.device.type == "cpu" and not is_tracing()


def assert_async(conditions: torch.Tensor, message: str) -> None:
    """Raise unless all conditions hold; on a GPU the assertion runs on the device, without a wait."""
    torch._assert_async(conditions.all(), message)


def is_known_true(condition: Any) -> bool:
    """Return True, and add a guard, if a condition on symbolic sizes holds for the traced sizes; else False."""
    return bool(torch_versions.guard_or_false(condition))


def out_of_graph(op: Any, why: str) -> Exception:
    """Return the error that makes torch.compile run a call outside of the graph; an error in fake modes.

    Dynamo breaks the graph for this error also where it makes fake tensors of a graph's inputs, which calls views
    again. With fullgraph=True it prints the text.
    """
    return torch_versions.UnsupportedFakeTensorException(
        f"{op}: with holdfast.spmd {why}, so the call runs outside of the graph. Drop fullgraph=True to let Dynamo "
        f"break the graph here, or keep torch's rule: holdfast.spmd.enable(exclude=[{op.overloadpacket.__name__!r}])"
    )


def leaves_graph(error: Exception) -> bool:
    """Return True for an error that makes torch.compile break the graph."""
    breaks = (
        torch_versions.UnsupportedFakeTensorException,
        torch_versions.UnsupportedOperatorException,
        torch_versions.DataDependentOutputException,
        torch_versions.DynamicOutputShapeException,
    )
    return isinstance(error, breaks)


def is_data_dependent(error: Exception) -> bool:
    """Return True for a branch on a size or number that only the values of tensors determine."""
    return isinstance(error, torch_versions.GuardOnDataDependentSymNode)


def keep_out_of_dynamo(function: Callable[..., Any]) -> None:
    """Keep a function, and everything that it calls, from being compiled: it runs eagerly between graphs."""
    frames = torch_versions.eval_frame
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(getattr(function, "__func__", function).__code__, skipped)


def simulates_ranks() -> bool:
    """Return True in torch's LocalTensorMode, where a coordinate holds a number for each simulated rank."""
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and module.local_tensor_mode() is not None


def own_coordinate(mesh: DeviceMesh) -> list[int]:
    """Return this rank's coordinate on a mesh; raises RuntimeError where torch simulates all ranks at once.

    A simulated coordinate compares unequal to 0 on every rank, the first included.
    """
    refuse_rank_in_shared_graph()
    coordinate = mesh.get_coordinate()
    if coordinate is None or simulates_ranks():
        raise RuntimeError(f"this process is not a single rank of {mesh}")
    return list(coordinate)
