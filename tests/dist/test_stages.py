"""Pipeline stages: keys dealt to ranks, in modules, optimizers, dicts and extra state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from tests.dist.harness import run_ranks


class Scale(nn.Module):
    """A module with a weight and an extra state that has a tensor in it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))
        self.seen: Any = {"amax": torch.full((2,), value), "count": int(value)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def build(keys: list[str], fill: float | None = None) -> dict[str, Any]:
    actor = nn.ModuleDict({key: Scale(float(key) if fill is None else fill) for key in keys})
    critic = nn.ModuleDict({key: Scale(10 + float(key) if fill is None else fill) for key in keys if int(key) % 2 == 0})
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.5, momentum=0.9)
    for module in (actor, critic):
        for parameter in module.parameters():
            optimizer.state[parameter] = {"momentum_buffer": parameter.detach() * 2}
    ema = {f"{key}.weight": actor[key].weight.detach() + 1 for key in keys} | {"decay": 0.99}
    return {"actor": actor, "critic": critic, "optimizer": optimizer, "ema": ema}


def check(state: dict[str, Any], keys: list[str]) -> None:
    truth = build(keys)
    for name in ("actor", "critic"):
        for key, module in state[name].items():
            value = float(truth[name][key].weight.detach()[0])
            assert torch.equal(module.weight, truth[name][key].weight), (name, key)
            assert module.seen["count"] == int(value) and module.seen["amax"].tolist() == [value, value]
            assert float(state["optimizer"].state[module.weight]["momentum_buffer"][0]) == 2 * value
    for key in keys:
        assert float(state["ema"][f"{key}.weight"][0]) == float(key) + 1
    assert state["ema"]["decay"] == 0.99


def _save(path: str) -> None:
    holdfast.save(path, build(["0"] if dist.get_rank() == 0 else ["1", "2"] if dist.get_rank() == 1 else ["3"]))


def _load(path: str) -> None:
    keys = ["0", "1"] if dist.get_rank() == 0 else ["2", "3"]
    state = build(keys, fill=-1.0)
    state["ema"]["decay"] = 0.0
    holdfast.load(path, state)
    check(state, keys)


def test_stages_load_on_other_stages_and_in_one_process(tmp_path: Path) -> None:
    everything = ["0", "1", "2", "3"]
    holdfast.save(tmp_path / "single", build(everything))
    run_ranks(3, _save, str(tmp_path / "stages"))
    for path in (tmp_path / "single").iterdir():
        if "safetensors" in path.name:
            assert path.read_bytes() == (tmp_path / "stages" / path.name).read_bytes(), path.name
    for name in ("single", "stages"):
        state = build(everything, fill=-1.0)
        holdfast.load(tmp_path / name, state)
        check(state, everything)
        run_ranks(2, _load, str(tmp_path / name))
