"""Writes the golden checkpoint of the current format version; run once for each release.

python -m tests.golden.make tests/golden/v1.3
"""

from __future__ import annotations

import datetime
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import holdfast
from holdfast.format.manifest import decode_manifest, encode_manifest

METRICS = {"loss": 0.5, "accuracy": 1, "unknown": None}
ABANDONS = ((40, ".attempt-0000000000000001"), (41, ".attempt-0000000000000002"))


class Mode(Enum):
    TRAIN = "train"
    TEST = "test"


class Position(NamedTuple):
    epoch: int
    sample: int


@dataclass
class Settings:
    mode: Mode = Mode.TRAIN
    root: Path = Path("data")
    scale: torch.Tensor = field(default_factory=lambda: torch.zeros(2))


def typed_values() -> dict[str, Any]:
    """Return what version 1.2 added: values with classes."""
    return {
        "settings": Settings(Mode.TEST, Path("a/b"), torch.tensor([1.0, 2.0])),
        "position": Position(3, 17),
        "window": deque([1.5, 2.5], maxlen=4),
        "counts": defaultdict(int, {"a": 1, 2: 3}),
        "began": datetime.datetime(2026, 11, 18, 13, 5, tzinfo=datetime.UTC),
        "took": datetime.timedelta(seconds=5),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }


def tuned_model() -> Any:
    """Return a model with a PEFT adapter, which version 1.2 added, with values that need no random numbers."""
    import peft

    model = peft.get_peft_model(nn.Sequential(nn.Linear(3, 2)), peft.LoraConfig(r=1, target_modules=["0"]))
    for number, tensor in enumerate(model.state_dict(keep_vars=True).values()):
        with torch.no_grad():
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) / 8 - number)
    return model


FILES: dict[str, Any] = {"tokenizer.json": b'{"model": {}}', "templates/chat.jinja": "{{ messages }}"}


class Scaled(nn.Module):
    """A model with a constant that no checkpoint holds, for the program that version 1.3 added."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor([2.0, -0.5]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.relu(self.inner(x)) * self.get_buffer("scale")


def scaled_model() -> Scaled:
    """Return the model of the program, with values that need no random numbers."""
    model = Scaled().eval()
    with torch.no_grad():
        model.inner.weight.copy_(torch.arange(6.0).reshape(2, 3) / 4 - 0.5)
        model.inner.bias.copy_(torch.tensor([0.25, -0.25]))
    return model


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


def add_what_save_has_no_option_for(folder: Path) -> None:
    """Sign the manifest again with metrics and with steps that a rewind left behind."""
    path = folder / "holdfast.json"
    manifest = decode_manifest(path.read_bytes(), "golden")
    path.write_bytes(encode_manifest(replace(manifest, metrics=METRICS, abandons=ABANDONS)))


if __name__ == "__main__":
    scaled = scaled_model()
    program = holdfast.export_program(scaled, (torch.ones(4, 3),), ({0: torch.export.Dim("rows")},))
    state = golden_state() | {"typed": typed_values(), "tuned": tuned_model(), "scaled": scaled}
    holdfast.save(Path(sys.argv[1]), state, step=42, files=FILES, program=program)
    add_what_save_has_no_option_for(Path(sys.argv[1]))
