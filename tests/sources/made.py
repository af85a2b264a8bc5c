"""Files as torch writes them, for the readers of foreign checkpoints."""

from __future__ import annotations

import io
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.sources.foreign import InMemoryReader


def torch_file(value: Any, *, zipped: bool = True) -> bytes:
    """What torch.save writes."""
    packed = io.BytesIO()
    torch.save(value, packed, _use_new_zipfile_serialization=zipped)
    return packed.getvalue()


def save_dcp(path: Path, state: dict[str, Any], **options: Any) -> Path:
    """A checkpoint of torch.distributed.checkpoint, written by one process."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True, **options)
    return path


def megatron_class(monkeypatch: pytest.MonkeyPatch, module: str, known: Any) -> Any:
    """A class under the name that it has in Megatron, which is not installed, so that pickles name it."""
    for end in [n for n, letter in enumerate(module) if letter == "."] + [len(module)]:
        if module[:end] not in sys.modules:
            monkeypatch.setitem(sys.modules, module[:end], types.ModuleType(module[:end]))
    known.__module__ = module
    monkeypatch.setattr(sys.modules[module], known.__name__, known, raising=False)
    return known


def trained(seed: int = 0, *, tied: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model with a buffer, and a tied weight if that is wanted, and its optimizer after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    if tied:
        model[3].weight = model[2].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))
    for _ in range(2):
        model(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def reader(data: bytes) -> InMemoryReader:
    return InMemoryReader(data)
