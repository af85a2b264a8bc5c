"""Writes the golden checkpoint of the current format version; run once for each release.

cd tests && python -m golden.make golden/v1.0
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast


def golden_state() -> dict[str, Any]:
    """A state of every kind, with values that need no random numbers."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for number, tensor in enumerate(model.state_dict(keep_vars=True).values()):
        with torch.no_grad():
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) / 4 + number)
    for number, parameter in enumerate(model.parameters()):
        moment = torch.full_like(parameter, number / 8)
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment * 2}
    odd = {
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "half": torch.ones(3).bfloat16(),
        "none": torch.zeros(0),
    }
    note = {"nan": float("nan"), "tuple": (1, b"x"), "keys": {1: "one"}}
    return {"model": model, "optimizer": optimizer, "odd": odd, "note": note}


if __name__ == "__main__":
    holdfast.save(Path(sys.argv[1]), golden_state(), step=42)
