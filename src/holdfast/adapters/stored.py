"""What adapters need to know of a checkpoint that is being loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy.typing as npt

from holdfast.format.manifest import Manifest
from holdfast.plan.files import Place


class StoredState(Protocol):
    """A checkpoint's tensors and values; `holdfast.open` gives one."""

    manifest: Manifest

    @property
    def path(self) -> str: ...

    @property
    def places(self) -> Mapping[str, Mapping[str, Place]]:
        """Group to key to where the tensor lies."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The entries of state.json, still encoded."""

    def logical_dtype(self, group: str, place: Place) -> str: ...

    def logical_shape(self, group: str, place: Place) -> tuple[int, ...]: ...

    def read(self, key: str, group: str | None = None, *, verify: bool = True) -> npt.NDArray[Any]: ...
