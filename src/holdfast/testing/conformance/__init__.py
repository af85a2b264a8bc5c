"""A conformance suite for storages, as pytest classes to subclass.

    class TestMine(StorageConformance):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path)

Use SharedStorageConformance for a storage that other processes can open. Each test gets a storage
whose root was never written to.
"""

from holdfast.testing.conformance.check_files import FileConformance
from holdfast.testing.conformance.check_folders import FolderConformance
from holdfast.testing.conformance.check_names import NameConformance
from holdfast.testing.conformance.check_pins import PinConformance
from holdfast.testing.conformance.shared import SharedConformance

__all__ = ["SharedStorageConformance", "StorageConformance"]


class StorageConformance(FileConformance, FolderConformance, PinConformance, NameConformance):
    """The tests of any storage."""


class SharedStorageConformance(StorageConformance, SharedConformance):
    """The tests of a storage that several processes open."""
