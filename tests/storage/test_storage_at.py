from pathlib import Path

import pytest

from holdfast.core.errors import Unsupported
from holdfast.storage import storage_at
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_a_local_storage(kind, tmp_path):
    storage = storage_at(kind(tmp_path))
    assert type(storage) is LocalStorage
    assert storage.name == str(tmp_path)


def test_a_storage_stays_as_it_is():
    storage = MemoryStorage()
    assert storage_at(storage) is storage


@pytest.mark.parametrize("root", ["s3://bucket/run", "gs://bucket", "file:///tmp/x"])
def test_an_address_is_refused_and_never_becomes_a_folder(root):
    with pytest.raises(Unsupported, match="local file systems only"):
        storage_at(root)
