"""What torch.distributed.checkpoint wrote from FSDP2 x TP on 4 ranks is read whole, and loads onto other layouts."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from tests.dist.harness import run_ranks
from tests.dist.layouts import LAYOUTS, local_values, plain, scramble

pytestmark = pytest.mark.sliced(4)

FROM = ("fsdp-tp-2x2", "fsdp-3", "hsdp-2x2")


def _save(layout: str, path: str, flat: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    held = LAYOUTS[layout][1]("truth", False)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(held.state["model"], held.state["optimizer"], options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def _load(layout: str, path: str) -> int:
    held = LAYOUTS[layout][1]("truth", False)
    truth = local_values(held)
    scramble(held)
    for group in held.state["optimizer"].param_groups:
        group["lr"] = 5.0
    report = holdfast.load(path, held.state)
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ()), report
    for name, value in local_values(held).items():
        assert torch.equal(value, truth[name]), name
    assert held.state["optimizer"].param_groups[0]["lr"] == 0.01
    return len(truth)


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.full)], ids=["nested", "flat"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dcp")
    for layout in FROM:
        run_ranks(LAYOUTS[layout][0], _save, layout, str(root / layout), request.param)
    return root


@pytest.mark.parametrize("layout", FROM)
def test_every_tensor_is_whole_bit_for_bit(saved: Path, layout: str) -> None:
    held = plain("truth", False)
    found = holdfast.open(saved / layout)
    model, optimizer = held.state["model"], held.state["optimizer"]
    assert set(found.keys("model")) == set(model.state_dict())
    for key, tensor in model.state_dict().items():
        assert np.array_equal(found.read(key, "model"), tensor.numpy()), key
    for key, parameter in model.named_parameters():
        for name, value in optimizer.state[parameter].items():
            assert np.array_equal(found.read(f"{key}/{name}", "optimizer"), value.numpy()), (key, name)
    assert max(len(recipe.terms) for recipe in found.contents.groups["model"].tensors.values()) > 1


@pytest.mark.parametrize("layout", ["single", "tp-2", "fsdp-3", "fsdp-tp-2x2"])
def test_it_loads_onto_another_layout(saved: Path, layout: str) -> None:
    done = run_ranks(LAYOUTS[layout][0], _load, layout, str(saved / FROM[0]))
    assert all(done)
