"""Run by Paddle: resumes a model and its AdamW from a unified checkpoint, and dumps what they hold then.

The steps are those of PaddleFormers: files by their index, Linear weights turned, states under the
names that Paddle numbers parameters with, all set into live layers and a live optimizer.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import paddle
from safetensors import safe_open

TURNED = re.compile(r"(.*\.)?(q|k|v|o|gate|up|down)_proj\.weight")


def tensors_of(folder: Path, stem: str) -> dict[str, np.ndarray]:
    index = json.loads((folder / f"{stem}.safetensors.index.json").read_text())
    out: dict[str, np.ndarray] = {}
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(folder / name, framework="np") as file:
            out |= {key: file.get_tensor(key) for key in file.keys()}
    assert out.keys() == index["weight_map"].keys()
    return out


def as_tensor(array: np.ndarray) -> paddle.Tensor:
    """bfloat16 as Paddle takes it from numpy: raw bits."""
    narrow = array.dtype == ml_dtypes.bfloat16
    return paddle.to_tensor(np.ascontiguousarray(array).view(np.uint16) if narrow else array)


class Named(paddle.nn.Layer):
    """Parameters of Paddle under the keys of a model, with the shapes that its layers have."""

    def __init__(self, shapes: dict[str, list[int]], dtype: str) -> None:
        super().__init__()
        self.keys = {}
        for number, (key, shape) in enumerate(shapes.items()):
            parameter = self.create_parameter(shape, dtype=dtype)
            self.add_parameter(f"p{number}", parameter)
            self.keys[key] = parameter


def dumped(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.astype("float32").numpy() if tensor.dtype == paddle.bfloat16 else tensor.numpy()


def main(folder: Path, out: Path) -> None:
    index = json.loads((folder / "optimizer.safetensors.index.json").read_text())
    model = {
        key: np.ascontiguousarray(value.T) if TURNED.fullmatch(key) else value
        for key, value in tensors_of(folder, "model").items()
    }
    narrow = next(iter(model.values())).dtype == ml_dtypes.bfloat16
    net = Named({key: list(value.shape) for key, value in model.items()}, "bfloat16" if narrow else "float32")
    for key, value in model.items():
        net.keys[key].set_value(as_tensor(value))
    optimizer = paddle.optimizer.AdamW(0.01, parameters=list(net.keys.values()), multi_precision=narrow)
    optimizer._create_accumulators(paddle.static.default_main_program().global_block(), list(net.keys.values()))
    state = {}
    for key, value in tensors_of(folder, "optimizer").items():
        owner, _, name = key.rpartition("/")
        static = net.keys[owner].name + ("_fp32_master_0" if narrow else "")
        state[f"{static}_{name}"] = paddle.to_tensor(value)
    if index["master_weights"]:
        masters = tensors_of(folder, "master_weights")
        state["master_weights"] = {net.keys[key].name: paddle.to_tensor(value) for key, value in masters.items()}
    optimizer.set_state_dict(state)
    held = optimizer.state_dict()
    found = {f"model::{key}": dumped(parameter) for key, parameter in net.keys.items()}
    keys = {parameter.name: key for key, parameter in net.keys.items()}
    for name, tensor in held.get("master_weights", {}).items():
        found[f"master_weights::{keys[name]}"] = dumped(tensor)
    for name, tensor in held.items():
        if name not in ("master_weights", "LR_Scheduler"):
            owner = max((own for own in keys if name.startswith(own + "_")), key=len)
            short = name.removeprefix(owner).removeprefix("_fp32_master_0").removeprefix("_")
            found[f"optimizer::{keys[owner]}/{short}"] = dumped(tensor)
    np.savez(out, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
