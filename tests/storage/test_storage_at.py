import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.storage import locate, storage_at
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


@pytest.mark.parametrize("root", ["file:///tmp/x", "http://host/run", "nonsense://bucket", "://x"])
def test_an_unknown_address_is_refused_and_never_becomes_a_folder(root):
    with pytest.raises(Unsupported, match="no storage supports"):
        storage_at(root)


def test_an_address_is_an_object_store_and_says_how_to_make_it_again():
    pytest.importorskip("obstore")
    storage: Any = storage_at("s3://bucket//some/run/?grace_s=60&deadline_s=2.5")
    assert storage.name == "s3://bucket/some/run"
    assert storage.address == "s3://bucket/some/run?deadline_s=2.5&grace_s=60"
    again: Any = storage_at(storage.address)
    assert again.address == storage.address
    assert storage.whole_files


@pytest.mark.parametrize(
    "root",
    ["s3:///run", "s3://bucket/../x", "s3://b/r?none=1", "s3://b/r?deadline_s=0", "s3://b/r?grace_s=x", "s3://b/#f"],
)
def test_an_address_that_makes_no_sense_is_refused(root):
    with pytest.raises(InvalidArgument):
        storage_at(root)


def test_a_checkpoints_address_is_a_root_and_a_folder():
    pytest.importorskip("obstore")
    storage, folder = locate("s3://bucket/run/step-1?grace_s=60")
    assert (storage.address, folder) == ("s3://bucket/run?grace_s=60", "step-1")
    with pytest.raises(InvalidArgument, match="whole bucket"):
        locate("s3://bucket")


def test_without_obstore_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(Unsupported, match=r"pip install 'holdfast\[objects\]'"):
        storage_at("s3://bucket/run")
