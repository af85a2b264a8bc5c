"""Linear, RMSNorm and SwiGLU that compute in their input's dtype, so that fp32 parameters suit bf16 activations."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional


class Linear(nn.Linear):
    """A linear layer whose weight is cast to the input's dtype; gradients are in fp32.

    A plain input beside a replicated DTensor as weight is the rank's part; the gradient is then a sum over ranks.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (_as_input(parameter, x) for parameter in (self.weight, self.bias))
        assert weight is not None
        return functional.linear(x, weight, bias)


def _as_input(parameter: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter in the dtype of `x`, and as a plain tensor if `x` is one."""
    if parameter is None:
        return None
    if isinstance(parameter, DTensor) and not isinstance(x, DTensor):
        if not all(place.is_replicate() for place in parameter.placements):
            raise ValueError(f"a plain input needs a replicated weight, not {parameter.placements}")
        parameter = parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)
    return parameter.to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dim, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class SwiGLU(nn.Module):
    """The gated feed-forward: down(silu(gate) * up)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner, bias=False)
        self.up_proj = Linear(hidden, inner, bias=False)
        self.down_proj = Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
