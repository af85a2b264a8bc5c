"""With the real Paddle: programs of `paddle.jit.save` run with the outputs that Paddle computes. `make interop`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.sources.paddle.pir.pir_rules import RULES
from tests.interop.test_paddle import HERE, missing_paddle, run_paddle
from tests.sources.paddle.pir.exports import MODELS, TOLERANCE, difference, source_program

pytestmark = pytest.mark.skipif(missing_paddle() is not None, reason=missing_paddle() or "")


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model, operator and layer, exported by the Paddle that is installed."""
    folder = tmp_path_factory.mktemp("programs")
    run_paddle(folder, str(HERE / "program_writer.py"), str(folder))
    return folder


@pytest.mark.parametrize("suffix", ["", "_other"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_outputs_that_paddle_computes(exports: Path, name: str, suffix: str) -> None:
    apart = difference(exports / name, suffix)
    print(f"{name}{suffix}: outputs within {apart:.1e} of Paddle's")
    assert apart <= TOLERANCE


def test_every_operator_has_the_outputs_that_paddle_computes(exports: Path) -> None:
    apart = {folder.name: difference(folder) for folder in sorted(exports.iterdir()) if folder.name not in MODELS}
    print(f"{len(apart)} operators and layers: outputs within {max(apart.values()):.1e} of Paddle's")
    assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}
    assert len(apart) > 190


def test_every_rule_was_compared(exports: Path) -> None:
    used = {name for folder in exports.iterdir() for name in source_program(folder / "model.json").operators}
    assert sorted(set(RULES) - used) == []


@pytest.mark.parametrize("name", [name for name in MODELS if name != "specials"])
def test_weights_have_their_names_and_values(exports: Path, name: str) -> None:
    truth, checkpoint = np.load(exports / name / "weights.npz"), holdfast.open(exports / name / "model.json")
    keys = set(checkpoint.keys("model"))
    assert keys == set(truth) & keys
    assert len(keys) > 3
    assert all(np.array_equal(checkpoint.read(key).astype(truth[key].dtype), truth[key]) for key in keys)
