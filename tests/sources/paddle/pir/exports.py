"""Exports of the real Paddle: those in the repository, and how their outputs compare with Paddle's."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast
from holdfast.program.graph import TensorType
from holdfast.sources.foreign import Foreign
from holdfast.sources.source_program import SourceProgram

GOLDEN = Path(__file__).parents[3] / "golden" / "paddle_program"
MODELS = ("mlp", "cnn", "block", "encoder", "decoder", "mixed", "mixed_cnn", "mixed_block", "specials")
TOLERANCE = 1e-6


def opened(path: Path) -> Foreign:
    """Open an export."""
    checkpoint = holdfast.open(path)
    assert isinstance(checkpoint, Foreign)
    return checkpoint


def source_program(path: Path) -> SourceProgram:
    """Return the program of an export as its own plain data."""
    found = opened(path).source_program
    assert found is not None
    return found


def translated(path: Path) -> holdfast.Program:
    """Return the program of an export as a Holdfast program."""
    found = opened(path).program
    assert found is not None
    return found


def unpack(folder: Path) -> Path:
    """Unpack the exports of single operators."""
    with tarfile.open(GOLDEN / "operators.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def runs(folder: Path, suffix: str = "") -> tuple[Any, list[torch.Tensor], list[np.ndarray[Any, Any]]]:
    """Return the module of an export, its inputs, and the outputs that Paddle computed."""
    module = holdfast.load_program(folder / "model.json")
    stored, truth = np.load(folder / f"inputs{suffix}.npz"), np.load(folder / f"outputs{suffix}.npz")
    types = [entry.type for entry in module.program.inputs]
    dtypes = [getattr(torch, kind.dtype) for kind in types if isinstance(kind, TensorType)]
    inputs = [torch.from_numpy(stored[str(index)]).to(dtype) for index, dtype in enumerate(dtypes)]
    return module, inputs, [truth[str(index)] for index in range(len(truth.files))]


def difference(folder: Path, suffix: str = "") -> float:
    """Return how far outputs are from Paddle's: of numbers over 1, relative. Raises AssertionError for other kinds."""
    module, inputs, truth = runs(folder, suffix)
    with torch.no_grad():
        found = module(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    assert len(outputs) == len(truth)
    return max(_apart(output, expected) for output, expected in zip(outputs, truth, strict=True))


def _apart(output: torch.Tensor, expected: np.ndarray[Any, Any]) -> float:
    array = output.float().numpy() if output.dtype is torch.bfloat16 else output.numpy()
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    if array.dtype.kind not in "fc":
        assert np.array_equal(array, expected)
        return 0.0
    assert np.array_equal(np.isnan(array), np.isnan(expected))
    finite = np.isfinite(expected)
    rest = ~finite & ~np.isnan(expected)
    assert np.array_equal(array[rest], expected[rest])
    apart = np.abs(array[finite].astype(np.float64) - expected[finite])
    return float((apart / np.maximum(1, np.abs(expected[finite]))).max(initial=0.0))


def edited(folder: Path, target: Path, edit: Callable[[list[dict[str, Any]]], None]) -> Path:
    """Copy an export, with its operators changed by `edit`; return the path of the program."""
    target.mkdir(parents=True, exist_ok=True)
    program = json.loads((folder / "model.json").read_bytes())
    edit(program["program"]["regions"][0]["blocks"][0]["ops"])
    (target / "model.json").write_text(json.dumps(program))
    if (folder / "model.pdiparams").exists():
        (target / "model.pdiparams").write_bytes((folder / "model.pdiparams").read_bytes())
    return target / "model.json"


def operators_named(operators: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the operators with a name, of which there is at least one."""
    found = [operator for operator in operators if operator["#"] == name]
    assert found, name
    return found
