"""Run by Paddle: trains small models and saves their state dicts with paddle.save, and the truth beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle

STEPS = 3


def network() -> paddle.nn.Layer:
    paddle.seed(7)
    return paddle.nn.Sequential(paddle.nn.Embedding(10, 4), paddle.nn.Linear(4, 6), paddle.nn.Linear(6, 4))


def train() -> tuple[paddle.nn.Layer, paddle.optimizer.Optimizer]:
    net = network()
    rate = paddle.optimizer.lr.StepDecay(0.01, step_size=2)
    optimizer = paddle.optimizer.AdamW(rate, beta2=0.95, parameters=net.parameters())
    for _ in range(STEPS):
        net(paddle.arange(10)).square().sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        rate.step()
    return net, optimizer


def fill() -> tuple[paddle.nn.Layer, paddle.optimizer.Optimizer]:
    """A bfloat16 model with masters: a CPU cannot train it, so its states are given values."""
    net = network()
    net.to(dtype="bfloat16")
    optimizer = paddle.optimizer.AdamW(0.01, parameters=net.parameters(), multi_precision=True)
    optimizer._create_accumulators(paddle.static.default_main_program().global_block(), net.parameters())
    state = optimizer.state_dict()
    for tensor in [*state.pop("master_weights").values(), *state.values()]:
        if tensor.ndim > 1 or tensor.shape != [1]:
            tensor.set_value(tensor + paddle.randn(tensor.shape) / 1000)
    return net, optimizer


def array(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.astype("float32").numpy() if tensor.dtype == paddle.bfloat16 else tensor.numpy()


def truth_of(net: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer) -> dict[str, np.ndarray]:
    """The values as Paddle has them, by Holdfast's group and key."""
    keys = {tensor.name: key for key, tensor in net.state_dict().items()}
    truth = {f"model::{key}": array(tensor) for key, tensor in net.state_dict().items()}
    for name, tensor in optimizer.state_dict().items():
        if name == "master_weights":
            truth |= {f"master_weights::{keys[owner]}": array(master) for owner, master in tensor.items()}
        elif name != "LR_Scheduler":
            owner = max((owner for owner in keys if name.startswith(owner)), key=len)
            state = name.removeprefix(owner).removeprefix("_fp32_master_0").removeprefix("_")
            truth[f"optimizer::{keys[owner]}/{state}"] = array(tensor)
    return truth


def nested_values() -> dict[str, object]:
    """Values that are nested in every way which paddle.save takes."""
    paddle.seed(11)
    a, b, c = paddle.randn([3, 4]), paddle.randn([2, 2]), paddle.randn([2, 3]).astype("bfloat16")
    return {
        "list": {"w": a, "l": [b, 5, "text"]},
        "deep": {"a": {"b": {"w": b}}},
        "mixed": {"w": a, "t": (b, {"x": [c, np.arange(3)]}), "epoch": 3, "config": {"name": "net", "sizes": [1, 2]}},
        "parts": {
            "model": {"x.w": a, "n": {"y": c}},
            "opt": {"state": [{"m": b}]},
            "ema": {"d": {"x.w": b}},
            "epoch": 4,
        },
        "top": [a, (b, c)],
    }


def flat(value: object, path: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The tensors and arrays of a nested value, by dotted path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    if isinstance(value, paddle.Tensor | np.ndarray):
        return {".".join(path): array(value) if isinstance(value, paddle.Tensor) else value}
    return {key: found for name, item in items for key, found in flat(item, (*path, str(name))).items()}


def write_nested(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    truth = {}
    for name, value in nested_values().items():
        paddle.save(value, str(folder / f"{name}.pdparams"))
        truth |= {f"{name}::{key}": found for key, found in flat(value).items()}
    _, optimizer = train()
    paddle.save({"a": {"b": optimizer.state_dict()}}, str(folder / "optimizer.pdopt"))
    truth |= {
        f"optimizer::a.b.{key}": array(found)
        for key, found in optimizer.state_dict().items()
        if isinstance(found, paddle.Tensor)
    }
    np.savez(folder.parent / "truth_nested.npz", **truth)


def main(folder: Path) -> None:
    write_nested(folder / "nested")
    for narrow in (False, True):
        name = "bf16" if narrow else "fp32"
        net, optimizer = fill() if narrow else train()
        own = folder / f"params_{name}"
        paddle.save(net.state_dict(), str(own / "model_state.pdparams"))
        paddle.save(optimizer.state_dict(), str(own / "optimizer.pdopt"))
        np.savez(folder / f"truth_params_{name}.npz", **truth_of(net, optimizer))  # type: ignore[arg-type]
        if not narrow:
            paddle.save(net.state_dict(), str(folder / "protocol2.pdparams"), protocol=2)
            both = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
            paddle.save(both, str(folder / "nested.pdparams"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
