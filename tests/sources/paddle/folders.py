"""Folders as Paddle writes them, made to order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from holdfast.sources import open_stored

GOLDEN = Path(__file__).parents[2] / "golden" / "paddle"
PAIRS = (("moment1_0", 0.5), ("moment2_0", 0.25))


def random_matrix(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def states_of(weights: dict[str, np.ndarray[Any, Any]], power: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    """Moments that can be told from each other and from their weight, in the weight's own layout."""
    out = {}
    for key, weight in weights.items():
        for name, factor in PAIRS:
            out[f"{key}/{name}"] = (weight.astype(np.float32) * np.float32(factor)).copy()
        for number, beta in ((1, 0.9), (2, 0.999)):
            product = np.multiply.accumulate(np.full(power + 1, beta, np.float32))[power:]
            out[f"{key}/beta{number}_pow_acc_0"] = product
    return out


def write_group(
    folder: Path, stem: str, tensors: dict[str, np.ndarray[Any, Any]], form: str = "np", **index: Any
) -> None:
    """One file and its index, as PaddleFormers writes them on one card."""
    folder.mkdir(exist_ok=True)
    name = f"{stem}-00001-of-00001.safetensors"
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / name, {"format": form})
    fields = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(tensors, name), **index}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(fields, indent=4))


def check_truth(path: Path, truth: Path) -> int:
    """Compare every tensor of a checkpoint with what Paddle had in memory; returns how many there are."""
    checkpoint = open_stored(path)
    expected = np.load(truth)
    found = {f"{group}::{key}" for group in checkpoint.groups for key in checkpoint.keys(group)}
    assert found == set(expected)
    for name in expected:
        group, _, key = name.partition("::")
        got = checkpoint.read(key, group)
        assert got.shape == expected[name].shape
        assert got.astype(expected[name].dtype).tobytes() == expected[name].tobytes(), name
    return len(found)
