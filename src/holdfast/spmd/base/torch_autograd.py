"""Autograd: the gradient formula that is running, and which in-place writes torch counts."""

from __future__ import annotations

from typing import Any

import torch


def in_gradient(of: str = "") -> bool:
    """Return True while autograd runs a node whose name starts with `of`; tensors made there are equal on all ranks."""
    return (node := torch._C._current_autograd_node()) is not None and (not of or node.name().startswith(of))


def counts_write(op: Any, view: torch.Tensor, base: torch.Tensor) -> bool:
    """Return True if torch will count the write of `op` into `view` as a write into `base`.

    torch does not for `.data` of a view, nor for foreach and fused operators.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.ADInplaceOrView):
        return False
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(base):
        before = view._version
        torch.autograd.graph.increment_version(base)
        return view._version != before
