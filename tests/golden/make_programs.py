"""Writes a golden program of the running torch: `python -m tests.golden.make_programs`, run once for each release.

It becomes tests/golden/programs/torch-X.Y.json, in both dialects, with the constants as numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import holdfast

FOLDER = Path(__file__).parent / "programs"


class Golden(nn.Module):
    """What most models have: attention, norms, convolution, branches, a block without gradients, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("tilt", torch.linspace(-1, 1, 8), persistent=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        hidden = self.table(ids) + self.get_buffer("tilt")
        hidden = hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        rows, length, width = hidden.shape
        q, k, v = (part.view(rows, length, 2, 4).transpose(1, 2) for part in self.qkv(self.norm(hidden)).chunk(3, -1))
        with torch.no_grad():
            bias = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(mask == 0, float("-inf"))[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(rows, length, width)
        hidden = self.rms(hidden + F.gelu(mixed, approximate="tanh"))
        hidden = self.batch(hidden.transpose(1, 2)).transpose(1, 2)
        if length > 4:
            hidden = F.dropout(hidden, 0.1, training=self.training)
        return {"logits": self.head(hidden), "pooled": torch.amax(F.softplus(hidden), dim=1), "length": length}


def golden_model() -> Golden:
    """Return the model with values that need no random numbers."""
    model = Golden().eval()
    for number, tensor in enumerate(model.state_dict(keep_vars=True).values()):
        if tensor.is_floating_point():
            with torch.no_grad():
                values = torch.arange(tensor.numel(), dtype=torch.float64).mul_(0.7 + number).sin_()
                tensor.copy_(values.reshape(tensor.shape) * 0.4 + (1.2 if "var" in str(number) else 0.0))
    model.batch.running_var.abs_().add_(0.5)
    return model


def inputs(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs that need no random numbers; the last position of each row is masked."""
    ids = (torch.arange(rows * length).reshape(rows, length) * 7) % 16
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[:, -1] = 0
    return ids, mask


def main() -> None:
    rows, length = torch.export.Dim("rows"), torch.export.Dim("length", min=5, max=512)
    sizes = {"ids": {0: rows, 1: length}, "mask": {0: rows, 1: length}}
    made = {}
    for name, decompose in (("training", False), ("core", True)):
        program = holdfast.export_program(golden_model(), inputs(2, 6), sizes, decompose)
        made[name] = json.loads(program.to_json())
        made["constants"] = {key: value.tolist() for key, value in program.constants.items()}
    version = ".".join(str(torch.__version__).split(".")[:2])
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"torch-{version}.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
