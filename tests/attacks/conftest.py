import shutil

import pytest

from tests.attacks.attack import save_original


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    return save_original(tmp_path_factory.mktemp("attacks") / "original")


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
