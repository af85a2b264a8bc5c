"""Loads that do not fill everything: what is said, and what is an error."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import holdfast


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    holdfast.save(tmp_path / "x", {"model": model, "note": {"epoch": 3}})
    return tmp_path / "x"


def other() -> nn.Module:
    return nn.Sequential(OrderedDict([("0", nn.Linear(3, 4)), ("1", nn.Linear(4, 5)), ("3", nn.Linear(2, 2).half())]))


def test_a_load_that_fills_nothing_is_an_error_also_when_not_strict(tmp_path: Path, saved: Path) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 4)

    live = Other()
    before = live.inner.weight.detach().clone()
    for state in ({"model": live}, {"critic": live}, {"model": nn.Sequential(nn.Linear(9, 9))}):
        with pytest.raises(holdfast.Mismatch, match="has nothing that fits the live state; nothing was loaded"):
            holdfast.load(saved, state, strict=False)
    with holdfast.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": nn.Linear(2, 2)}).result(60)
        with pytest.raises(holdfast.Mismatch, match="has nothing that fits"):
            checkpointer.restore({"model": live}, strict=False)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 2)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(holdfast.Mismatch, match="has nothing that fits"):
        holdfast.load(adapter, {"model": live}, strict=False)
    assert torch.equal(live.inner.weight, before)


def test_what_patterns_leave_out_is_no_reason_to_warn(saved: Path) -> None:
    model = other()
    fits = ["0.*", "note"]
    holdfast.load(saved, {"model": model, "note": None}, strict=False, only=fits)
    holdfast.load(saved, {"model": model, "note": None}, strict=False, ignore=["1.*", "3.*"])
    holdfast.load(saved, {"model": model, "note": None}, strict=False, ignore=["model"])
    with pytest.warns(holdfast.HoldfastWarning, match=r"missing: model: 3\.bias"):
        holdfast.load(saved, {"model": model, "note": None}, strict=False, ignore=["1.*", "3.weight"])


def test_a_load_that_leaves_out_stored_tensors_alone_does_not_warn(saved: Path) -> None:
    report = holdfast.load(saved, {"model": nn.Sequential(nn.Linear(3, 4))}, strict=False)
    assert report.missing == () and len(report.unexpected) == 4


def test_values_and_options_count_as_filled(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "n": 3})
    live = nn.Linear(3, 3)
    state: dict[str, Any] = {"model": live, "n": None}
    with pytest.warns(holdfast.HoldfastWarning, match="model: weight: the shape differs"):
        holdfast.load(tmp_path / "x", state, strict=False)
    assert state["n"] == 3
    optimizer = torch.optim.SGD(live.parameters(), lr=0.1)
    with pytest.warns(holdfast.HoldfastWarning, match="model: weight: the shape differs"):
        holdfast.load(tmp_path / "x", {"model": live, "optimizer": optimizer}, strict=False)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_buffers_that_no_checkpoint_holds_are_reported(tmp_path: Path) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(2), persistent=False)
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("nothing", None, persistent=False)

    model = nn.Sequential(Rotary(), nn.Linear(2, 2))
    holdfast.save(tmp_path / "x", {"model": model, "n": 1})
    with torch.device("meta"):
        live = nn.Sequential(Rotary(), nn.Linear(2, 2))
    live.to_empty(device="cpu")
    report = holdfast.load(tmp_path / "x", {"model": torch.compile(live), "n": None})
    assert report.non_persistent == ("model: 0.inv_freq",)
    assert "not stored, left as they are: model: 0.inv_freq" in str(report)
    assert holdfast.load(tmp_path / "x", {"model": live, "n": None}, ignore=["model"]).non_persistent == ()
    assert holdfast.load(tmp_path / "x", {"n": None}).non_persistent == ()


def test_extra_state_follows_patterns(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        extra = 0

        def get_extra_state(self) -> Any:
            return {"n": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["n"]

    source: Any = nn.Sequential(Extra(1, 1), Extra(1, 1))
    source[0].extra, source[1].extra = 5, 6
    holdfast.save(tmp_path / "x", {"model": source})
    cases: list[Any] = [({"only": ["model"]}, (5, 6)), ({"only": ["0.*"]}, (5, 0)), ({"ignore": ["0.*"]}, (0, 6))]
    for options, extras in cases:
        live: Any = nn.Sequential(Extra(1, 1), Extra(1, 1))
        holdfast.load(tmp_path / "x", {"model": live}, **options)
        assert (live[0].extra, live[1].extra) == extras


def test_an_extra_state_that_nobody_takes_is_named(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"n": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    holdfast.save(tmp_path / "x", {"model": nn.Sequential(Extra(1, 1))})
    live = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(holdfast.Mismatch, match=r"not in the live state: model: 0\._extra_state"):
        holdfast.load(tmp_path / "x", {"model": live})
    holdfast.load(tmp_path / "x", {"model": live}, ignore=["*._extra_state"])
    assert holdfast.load(tmp_path / "x", {"model": live}, strict=False).unexpected == ("model: 0._extra_state",)
    holdfast.save(tmp_path / "y", {"model": live})
    with pytest.raises(holdfast.Mismatch, match=r"missing in the checkpoint: model: 0\._extra_state"):
        holdfast.load(tmp_path / "y", {"model": nn.Sequential(Extra(1, 1))})


@pytest.mark.parametrize("strict", [True, False])
def test_a_mistyped_name_is_told_with_the_names_that_there_are(tmp_path: Path, strict: bool) -> None:
    holdfast.save(tmp_path / "c", {"model": nn.Linear(2, 2), "n": {"a": 1}})
    with pytest.raises(holdfast.Mismatch, match="modle: no such group; the checkpoint has model, n"):
        holdfast.load(tmp_path / "c", {"modle": nn.Linear(2, 2)}, strict=strict)
