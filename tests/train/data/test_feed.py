"""Micro batches hold only what the model has words for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.train.loop import Trainer
from tests.dist.resume_cases import config


def test_a_token_beyond_the_vocabulary_is_refused_by_name(tmp_path: Path):
    np.full(1000, 32, np.uint16).tofile(tmp_path / "t.bin")
    data: dict[str, Any] = {"data__kind": '"tokens"', "data__path": f'"{tmp_path}/t.bin"'}
    with pytest.raises(holdfast.InvalidArgument, match=r"t\.bin.* has the token 32, but model\.vocab_size=32"):
        Trainer(config(tmp_path / "run", {}, train__steps=1, **data)).run()
    np.full(1000, 31, np.uint16).tofile(tmp_path / "t.bin")
    assert Trainer(config(tmp_path / "run", {}, train__steps=1, **data)).run().step == 1
