"""The suite that every storage must pass, on a real object store."""

from __future__ import annotations

import pytest

from holdfast.storage.objects.store import ObjectStorage
from holdfast.testing.conformance import SharedStorageConformance
from holdfast.testing.conformance.check_pins import PinConformance
from holdfast.testing.conformance.shared import SharedConformance


class TestObjects(SharedStorageConformance):
    @pytest.fixture
    def storage(self, root: str) -> ObjectStorage:
        return ObjectStorage(root)


class TestObjectsWithoutGrace(PinConformance, SharedConformance):
    """Where removed data goes at once: readers of this host are still waited for."""

    @pytest.fixture
    def storage(self, root: str) -> ObjectStorage:
        return ObjectStorage(f"{root}&grace_s=0")
