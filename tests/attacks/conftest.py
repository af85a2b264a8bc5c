import shutil

import pytest
import torch

import holdfast


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("attacks") / "original"
    holdfast.save(path, {"model": torch.nn.Linear(4, 3), "note": {"epoch": 1}})
    return path


@pytest.fixture
def checkpoint(original, tmp_path):
    """A small real checkpoint, to be attacked."""
    return shutil.copytree(original, tmp_path / "checkpoint")


@pytest.fixture
def foreign(tmp_path):
    """A folder for a Hugging Face checkpoint, still empty."""
    path = tmp_path / "foreign"
    path.mkdir()
    return path
