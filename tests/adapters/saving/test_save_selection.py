"""`only=` and `ignore=` of a save: what is in the checkpoint, what it may claim, and who is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast

TENSORS = ["0.bias", "0.weight", "1.bias", "1.weight"]


class Position:
    """An object of the program with a tensor in its state."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "seeds": torch.full((2,), self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"] + float(state["seeds"].sum())


def make(seed: int = 0, *, steps: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + seed))
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    values = {"a": torch.full((2,), 1.0 + seed), "b": [torch.full((3,), 2.0 + seed), 5 + seed]}
    state = {"model": model, "optimizer": optimizer, "values": values, "position": Position(1.0 + seed)}
    return state | {"epoch": 3 + seed, "ema": holdfast.EMA(model, 0.9)}


@pytest.mark.parametrize(
    ("patterns", "groups", "entries"),
    [
        ({"only": ["model"]}, {"model"}, set()),
        ({"only": ["model", "epoch"]}, {"model"}, {"epoch"}),
        ({"ignore": ["optimizer", "ema*"]}, {"model", "values", "position"}, {"values", "position", "epoch"}),
        ({"only": ["epoch"]}, set(), {"epoch"}),
        ({"only": ["optimizer"]}, {"optimizer"}, {"optimizer"}),
        ({"only": ["ema*"]}, {"ema/model"}, {"ema"}),
        ({"only": ["position"]}, {"position"}, {"position"}),
        ({"only": ["values"], "ignore": ["values/a"]}, {"values"}, {"values"}),
        ({"only": ["model/0.*"]}, {"model"}, set()),
    ],
)
def test_a_save_writes_what_is_selected(tmp_path: Path, patterns: Any, groups: set[str], entries: set[str]) -> None:
    saved = holdfast.save(tmp_path / "x", make(), **patterns)
    assert set(saved.groups) == groups and set(saved.state) == entries
    assert saved.verify().damage == ()
    live = make(1)
    report = holdfast.load(tmp_path / "x", live, **patterns)  # strict about what the same patterns select
    assert not report.missing and not report.unexpected and not report.mismatched
    with pytest.raises(holdfast.Mismatch, match="missing in the checkpoint"):
        holdfast.load(tmp_path / "x", make(1))


def test_parts_of_groups_are_left_out_by_key(tmp_path: Path) -> None:
    saved = holdfast.save(tmp_path / "x", make(), ignore=["*/exp_avg", "values/b.0", "1.bias"])
    assert saved.keys("model") == ["0.bias", "0.weight", "1.weight"]
    assert not any(key.endswith("/exp_avg") for key in saved.keys("optimizer"))
    assert saved.keys("values") == ["a"] and saved.state["values"]["value"]["b"] == [None, 5]
    live = make(1)
    kept = live["values"]["b"][0].clone()
    holdfast.load(tmp_path / "x", live, ignore=["*/exp_avg", "values/b.0", "1.bias"])
    assert torch.equal(live["values"]["b"][0], kept) and live["values"]["b"][1] == 5
    assert torch.equal(live["values"]["a"], torch.ones(2))
    with pytest.raises(holdfast.Mismatch, match=r"missing in the checkpoint: model: 1\.bias"):
        holdfast.load(tmp_path / "x", make(1), ignore=["optimizer", "ema*"])


def test_options_of_an_optimizer_can_be_left_out(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", make(), ignore=["*/param_groups"])
    live = make(1)
    report = holdfast.load(tmp_path / "x", live)
    assert live["optimizer"].param_groups[0]["lr"] == 0.2
    assert "optimizer: its param_groups were not saved; the live options stay" in report.notes


@pytest.mark.parametrize(
    ("patterns", "error", "text"),
    [
        ({"only": ["nothing"]}, holdfast.Mismatch, "'nothing' fits no key of the state"),
        ({"ignore": ["model", "layers.*"]}, holdfast.Mismatch, r"'layers\.\*' fits no key"),
        ({"ignore": ["*"]}, holdfast.InvalidArgument, "leave nothing to save"),
        ({"only": "model"}, holdfast.InvalidArgument, r"write \['model'\]"),
        ({"only": [3]}, holdfast.InvalidArgument, "patterns are a list of strings"),
    ],
)
def test_wrong_patterns_are_errors_and_write_nothing(tmp_path: Path, patterns: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        holdfast.save(tmp_path / "x", make(), **patterns)
    assert not (tmp_path / "x").exists()


def test_patterns_for_states_that_come_with_the_first_step_are_right_before_it(tmp_path: Path) -> None:
    saved = holdfast.save(tmp_path / "x", make(steps=0), ignore=["*/exp_avg"])
    assert "optimizer" in saved.state
    with pytest.raises(holdfast.Mismatch, match="'\\*/momentum_buffer' fits no key"):
        holdfast.save(tmp_path / "x", make(steps=0), ignore=["*/momentum_buffer"])


def test_masters_beside_a_rounded_model_belong_to_the_model(tmp_path: Path) -> None:
    saved = holdfast.save(tmp_path / "x", make(), only=["model"], model_dtype="bfloat16")
    assert set(saved.groups) == {"model", "master_weights"}
    model = make(1)["model"]
    holdfast.load(tmp_path / "x", {"model": model})
    assert torch.equal(model[0].weight, make()["model"][0].weight)
    saved = holdfast.save(tmp_path / "x", make(), ignore=["master_weights"], model_dtype="bfloat16")
    assert "master_weights" not in saved.groups and "model" in saved.groups
    saved = holdfast.save(tmp_path / "x", make(), ignore=["model"], model_dtype="bfloat16")
    assert {"master_weights", "model"}.isdisjoint(saved.groups)


def test_masters_of_an_optimizer_go_with_their_module(tmp_path: Path) -> None:
    model: Any = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = {param: torch.full(param.shape, 1.5) for param in model.parameters()}
    for param, master in masters.items():
        optimizer.state[param] = {"master_param": master.clone()}
    state = {"model": model, "optimizer": optimizer, "n": 1}
    for only in (["model", "optimizer"], ["master_weights", "optimizer"]):
        saved = holdfast.save(tmp_path / "x", state, only=only)
        assert "master_weights" in saved.groups
        for param in model.parameters():
            optimizer.state[param]["master_param"].zero_()
        holdfast.load(tmp_path / "x", state, only=only)
        for param, master in masters.items():
            assert torch.equal(optimizer.state[param]["master_param"], master)
    assert "master_weights" not in holdfast.save(tmp_path / "x", state, only=["optimizer"]).groups


def test_a_tied_weight_is_selected_by_any_of_its_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    saved = holdfast.save(tmp_path / "x", {"model": model}, only=["b.*"])
    assert saved.keys("model") == ["a.weight", "b.weight"]
    holdfast.load(tmp_path / "x", {"model": model}, only=["b.*"])
    assert holdfast.save(tmp_path / "x", {"model": model}, ignore=["b.*"]).keys("model") == ["c.bias", "c.weight"]


def test_a_mapping_writes_what_is_selected_of_the_live_keys(tmp_path: Path) -> None:
    mapping = "0.weight, 1.weight -> both, axis=0\n0.bias -> first"
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    sum(part(torch.ones(1, 3)).sum() for part in model).backward()
    saved = holdfast.save(tmp_path / "x", state, mapping=mapping, ignore=["*.bias"])
    assert saved.keys("model") == ["both"]
    with pytest.raises(holdfast.InvalidArgument, match="the mapping stores both in model: both; select both or"):
        holdfast.save(tmp_path / "y", state, mapping=mapping, only=["0.weight"])
    with holdfast.Checkpointer(tmp_path / "run", mapping=mapping, ignore=["*.bias", "*.bias/*"]) as checkpointer:
        checkpointer.save(0, state).result(60)
        state["optimizer"].step()
        with pytest.raises(holdfast.InvalidArgument, match="ignore the states, too"):
            holdfast.save(tmp_path / "y", state, mapping=mapping, ignore=["*.bias"])
        checkpointer.save(1, state).result(60)
        before = model[0].weight.detach().clone()
        with torch.no_grad():
            model[0].weight.zero_()
        assert checkpointer.restore(state) == 1
        assert torch.equal(model[0].weight, before)


class Unknown(torch.optim.SGD):
    """An optimizer whose state_dict says more than can be saved."""

    def state_dict(self) -> Any:
        return super().state_dict() | {"more": object()}


def test_what_is_left_out_need_not_be_storable(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, device="meta")})
    state = {"model": model, "optimizer": Unknown(model.parameters(), lr=0.1), "odd": {"it": object()}, "n": 3}
    without = ["b.*", "optimizer", "odd"]
    saved = holdfast.save(tmp_path / "x", state, ignore=without)
    assert saved.keys() == ["a.bias", "a.weight"] and saved.state["n"] is not None
    assert holdfast.save(tmp_path / "x", state, only=["n"]).keys() == []
    for name in without:
        with pytest.raises(holdfast.Unsupported):
            holdfast.save(tmp_path / "y", state, ignore=[other for other in without if other != name])
    with holdfast.Checkpointer(tmp_path / "run", ignore=without) as checkpointer:
        for step in (1, 2):
            torch.nn.init.constant_(model["a"].weight, step)
            checkpointer.save(step, state).result(60)
        torch.nn.init.zeros_(model["a"].weight)
        assert checkpointer.restore(state) == 2 and bool((model["a"].weight == 2).all())


@pytest.mark.slow
def test_a_model_that_is_not_whole_gets_no_config(tmp_path: Path) -> None:
    from tests.adapters.test_huggingface import llama

    model = llama()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "ema": holdfast.EMA(model, 0.9)}
    holdfast.save(tmp_path / "x", state, ignore=["optimizer"])
    assert (tmp_path / "x" / "config.json").exists() and (tmp_path / "x" / "ema" / "config.json").exists()
    holdfast.save(tmp_path / "x", state, ignore=["model/lm_head.*"])
    assert not list((tmp_path / "x").glob("*config.json")) and (tmp_path / "x" / "ema" / "config.json").exists()
    holdfast.save(tmp_path / "x", state, only=["optimizer"])
    assert not list((tmp_path / "x").rglob("*config.json"))
    with holdfast.Checkpointer(tmp_path / "run", only=["model.layers*"]) as checkpointer:
        checkpointer.save(1, state).result(60)
        checkpointer.save(2, state).result(60)  # with the plan and the cache of the first
    assert not list((tmp_path / "run").rglob("*config.json"))


def test_a_run_saves_and_restores_with_its_patterns(tmp_path: Path) -> None:
    patterns: dict[str, Any] = {"only": ["model", "optimizer", "epoch"], "ignore": ["*/exp_avg_sq"]}
    state = make()
    with holdfast.Checkpointer(tmp_path / "run", **patterns) as checkpointer:
        checkpointer.save(1, state).result(60)
        state["optimizer"].step()
        checkpointer.save(2, state).result(60)
        blocking = holdfast.save(tmp_path / "x", state, **patterns)
        stored = checkpointer.save(2, state).result(60)
        assert stored.keys() == blocking.keys() and set(stored.groups) == {"model", "optimizer"}
        files = sorted(path.name for path in (tmp_path / "x").glob("*.safetensors"))
        assert files and all(
            (tmp_path / "x" / file).read_bytes() == (Path(stored.path) / file).read_bytes() for file in files
        )
    live = make(1)
    with holdfast.Checkpointer(tmp_path / "run", **patterns) as checkpointer:
        assert checkpointer.restore(live) == 2
        assert live["epoch"] == 3 and live["position"].value == 2.0
        assert torch.equal(live["model"][0].weight, state["model"][0].weight)
        live = make(1)
        assert checkpointer.restore(live, only=["epoch"]) == 2 and live["epoch"] == 3
        assert not torch.equal(live["model"][0].weight, state["model"][0].weight)
        live = make(1)
        assert checkpointer.restore(live, ignore=["model"]) == 2 and live["epoch"] == 3
        assert not torch.equal(live["model"][0].weight, state["model"][0].weight)
    with holdfast.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(holdfast.Mismatch, match="exp_avg_sq"):
            checkpointer.restore(make(1), only=["model", "optimizer", "epoch"])
        with pytest.raises(holdfast.Mismatch, match="ema"):
            checkpointer.restore(make(1))


def test_a_run_whose_pattern_fits_nothing_says_so_at_the_save(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "run", ignore=["critic"]) as checkpointer:
        with pytest.warns(holdfast.HoldfastWarning, match="'critic' fits no key"):
            handle = checkpointer.save(1, make())
        with pytest.raises(holdfast.Mismatch, match="'critic' fits no key"):
            handle.result(60)
