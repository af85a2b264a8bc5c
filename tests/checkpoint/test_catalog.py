"""Which steps are committed: by manifests, never by folder names alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import holdfast
from holdfast.checkpoint.catalog import committed_steps
from holdfast.storage.local import LocalStorage


def test_only_folders_with_their_own_good_manifest_count(tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path)
    for step in (5, 1000):
        checkpointer.save(step, {"w": {"a": torch.zeros(2)}}).result()
    (tmp_path / "step-000000000007").mkdir()
    (tmp_path / "step-9").mkdir()
    (tmp_path / ".attempt-1").mkdir()
    (tmp_path / "abandoned-step-000000000003").mkdir()
    shutil.copytree(tmp_path / "step-000000000005", tmp_path / "step-000000002000")
    found = committed_steps(LocalStorage(tmp_path))
    assert [(entry.step, entry.manifest is not None) for entry in found] == [
        (5, True),
        (7, False),
        (1000, True),
        (2000, False),
    ]
    assert "its manifest belongs to step 5" in str(found[-1].problem)
    assert committed_steps(LocalStorage(tmp_path / "absent")) == []
