"""Export models and single operators with `paddle.jit.save`, with the outputs Paddle computes.

`program_writer.py FOLDER [NAME ...]` writes a folder for each case: model.json, model.pdiparams where there are
weights, inputs.npz and outputs.npz, and both for other sizes for the models. bfloat16 is stored as float32 there,
which holds every value.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("FLAGS_use_mkldnn", "0")  # its kernels fail on processors that some machines have

sys.path.insert(0, str(Path(__file__).parents[2]))  # this runs in Paddle's environment

import numpy as np
import paddle

from tests.interop.program_models import MODELS, Case, Shapes
from tests.interop.program_operators import operator_cases


def examples(shapes: Shapes, batch: int = 5, length: int = 6) -> list[Any]:
    """Return inputs: `batch` for the first size that may differ, `length` for every other."""
    found = []
    for index, (shape, dtype) in enumerate(shapes):
        sizes = [(batch if dim == 0 else length) if size is None else size for dim, size in enumerate(shape)]
        generator = np.random.default_rng(index)
        if dtype == "int64":
            found.append(paddle.to_tensor(generator.integers(0, 7, sizes), dtype))
        else:
            found.append(paddle.to_tensor(generator.random(sizes).astype("float32")).astype(dtype))
    return found


def as_array(tensor: Any) -> Any:
    return tensor.astype("float32").numpy() if tensor.dtype == paddle.bfloat16 else tensor.numpy()


def write(folder: Path, name: str, case: Case) -> None:
    make, shapes = case
    paddle.seed(7)
    layer = make()
    layer.eval()
    names = ("x", "y", "mask") if name != "encoder" else ("x", "mask")
    spec = [
        paddle.static.InputSpec(list(shape), dtype, key) for (shape, dtype), key in zip(shapes, names, strict=False)
    ]
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    paddle.jit.save(layer, str(target / "model"), input_spec=spec)
    write_run(target, layer, examples(shapes), "")
    if name in MODELS:
        write_run(target, layer, examples(shapes, 3, 9), "_other")
    np.savez(target / "weights.npz", **{value.name: as_array(value) for value in layer.state_dict().values()})


def write_run(target: Path, layer: Any, inputs: list[Any], suffix: str) -> None:
    """Write inputs, and the outputs of the layer for them."""
    found = layer(*inputs)
    outputs = list(found) if isinstance(found, list | tuple) else [found]
    for name, values in (("inputs", inputs), ("outputs", outputs)):
        np.savez(target / f"{name}{suffix}.npz", **{f"{index}": as_array(value) for index, value in enumerate(values)})


def main(folder: Path, chosen: Sequence[str]) -> None:
    for name, case in {**MODELS, **operator_cases()}.items():
        if not chosen or name in chosen:
            write(folder, name, case)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
