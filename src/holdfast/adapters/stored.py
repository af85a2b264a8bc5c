"""What adapters need to know of a checkpoint that is being loaded."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from holdfast.plan.contents import Contents


class StoredState(Protocol):
    """A checkpoint's tensors and values; `holdfast.open` gives one."""

    @property
    def path(self) -> str: ...

    @property
    def contents(self) -> Contents: ...

    def read(self, key: str, group: str | None = None, *, verify: bool = True) -> npt.NDArray[Any]: ...
