"""What `resume_from_checkpoint` names: a step by its folder or its number, and the steps that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.integrations.transformers.resume_point import _locate
from holdfast.storage.local import LocalStorage


def test_a_step_is_named_by_its_number(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(35, {"n": 1}).result()
    storage = LocalStorage(tmp_path)
    whole = str(tmp_path / "step-000000000035")
    for name in ("step-35", "checkpoint-35", "step-000000000035"):
        assert _locate(storage, str(tmp_path), str(tmp_path / name)) == [whole, 35]
    for name in ("step-36", "other"):
        with pytest.raises(holdfast.NotFound, match=r"is not a folder; .* has step 35"):
            _locate(storage, str(tmp_path), str(tmp_path / name))
    with pytest.raises(holdfast.NotFound, match="is not a folder"):
        _locate(storage, str(tmp_path), str(tmp_path / "elsewhere" / "step-35"))
