"""Which config makes which run; `tests.train.embedding.trainer.test_embedding_config` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import NotFound
from holdfast.train.config import RunConfig
from holdfast.train.open_run import open_run

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_config_without_embedding_trains_text() -> None:
    found = open_run(EXAMPLES / "dense-tiny.toml", ["train.steps=7"])
    assert isinstance(found, RunConfig) and found.train.steps == 7


def test_a_config_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"none.toml: cannot read the config"):
        open_run(tmp_path / "none.toml")
