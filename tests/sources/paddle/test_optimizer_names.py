"""Paddle's states under torch's names: steps from the powers of betas, options that are known."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.errors import Unsupported
from holdfast.sources import open_stored
from holdfast.sources.paddle.beta_powers import find_steps, powers_at
from holdfast.sources.paddle.optimizer_names import as_torch
from tests.sources.paddle.folders import GOLDEN, random_matrix, states_of, write_group


def pair(step: int, betas: tuple[float, float]) -> tuple[float, float]:
    first, second = powers_at(step, betas)
    return float(first), float(second)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.8, 0.99)])
@pytest.mark.parametrize("step", [0, 1, 2, 17, 300, 1200, 30_000])
def test_the_step_is_found_from_the_powers(betas: tuple[float, float], step: int) -> None:
    powers = pair(step, betas)
    found = find_steps([powers], noted=step)
    assert found is not None and found.by_powers[powers] == step
    assert found.betas == (betas if min(powers) > 1e-37 else None)


def test_steps_that_differ_between_parameters() -> None:
    early, late = (pair(step, (0.9, 0.999)) for step in (3, 50))
    found = find_steps([late, early])
    assert found is not None and found.by_powers == {early: 3, late: 50}


def test_parameters_with_betas_of_their_own() -> None:
    pairs = [pair(step, betas) for step, betas in ((4, (0.9, 0.999)), (6, (0.8, 0.95)))]
    found = find_steps(pairs)
    assert found is not None and found.betas is None
    assert found.by_powers == dict(zip(pairs, (4, 6), strict=True))


def test_powers_that_were_lost_give_the_first_step_without_them() -> None:
    found = find_steps([(0.0, 0.0)])
    assert found is not None and found.betas is None
    assert 80_000 < found.by_powers[0.0, 0.0] < 100_000
    noted = find_steps([(0.0, 0.0)], noted=500_000)
    assert noted is not None and noted.by_powers[0.0, 0.0] == 500_000


def test_powers_of_no_usual_betas_are_not_guessed_at() -> None:
    assert find_steps([(0.123, 0.456)]) is None


def test_moments_and_steps_have_torchs_names() -> None:
    checkpoint = open_stored(GOLDEN / "shard2_fp32_hf")
    seen = as_torch(checkpoint)
    key = "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(seen.read(f"{key}/exp_avg"), checkpoint.read(f"{key}/moment1_0"))
    assert np.array_equal(seen.read(f"{key}/exp_avg_sq"), checkpoint.read(f"{key}/moment2_0"))
    assert seen.read(f"{key}/step") == np.float32(1)
    assert seen.read(f"{key}/step").shape == ()
    assert {name.rpartition("/")[2] for name in seen.keys("optimizer")} == {"exp_avg", "exp_avg_sq", "step"}
    entry = seen.state["optimizer"]
    assert sorted(entry["groups"][0]["params"]) == sorted(checkpoint.keys("model"))
    assert entry["groups"][0]["options"] == {"betas": {"$tuple": [0.9, 0.999]}}


def test_other_checkpoints_stay_as_they_are() -> None:
    checkpoint = open_stored(GOLDEN / "flex_model_state")
    assert as_torch(checkpoint) is checkpoint


def test_a_step_that_cannot_be_known_is_refused_unless_the_trainer_noted_it(tmp_path: Path) -> None:
    weights = {"fc.weight": random_matrix(1, 4, 6)}
    states = states_of(weights)
    states["fc.weight/beta2_pow_acc_0"] = np.array([0.31], dtype=np.float32)
    write_group(tmp_path / "c", "model", weights)
    write_group(tmp_path / "c", "optimizer", states)
    with pytest.raises(Unsupported, match=r"beta2_pow_acc 0\.31.*trainer_state\.json"):
        as_torch(open_stored(tmp_path / "c"))
    (tmp_path / "c" / "trainer_state.json").write_text('{"global_step": 12}')
    assert as_torch(open_stored(tmp_path / "c")).read("fc.weight/step") == 12


def test_what_the_trainer_noted_does_not_outdo_the_powers(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "shard2_fp32_hf", tmp_path / "c")
    (tmp_path / "c" / "trainer_state.json").write_text('{"global_step": 500}')
    assert as_torch(open_stored(tmp_path / "c")).read("lm_head.weight/step") == 1
