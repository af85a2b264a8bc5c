"""Publishing: nothing of a user's is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.publish import check_replaceable
from holdfast.core.errors import StorageError
from holdfast.storage.local import LocalStorage


def test_a_folder_of_other_files_is_not_ours_to_replace(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    check_replaceable(storage, "absent")
    (tmp_path / "empty").mkdir()
    check_replaceable(storage, "empty")
    (tmp_path / "empty" / "mine").write_text("x")
    with pytest.raises(StorageError, match="mine"):
        check_replaceable(storage, "empty")
