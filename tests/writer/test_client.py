"""The writer process: what a trainer hears when it cannot start one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import holdfast


def test_a_writer_that_cannot_start_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = str(tmp_path / "no-python")
    monkeypatch.setattr(sys, "executable", nowhere)
    with holdfast.Checkpointer(tmp_path / "root") as checkpointer:
        with pytest.warns(UserWarning, match=r"step 1 was not saved: the writer process cannot start .*no-python"):
            handle = checkpointer.save(1, {"w": torch.zeros(3)})
        with pytest.raises(holdfast.HoldfastError, match=r"the writer process cannot start .*no-python"):
            handle.result(60)
    monkeypatch.undo()
    with holdfast.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
