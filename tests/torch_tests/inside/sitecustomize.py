"""Imported by every Python process of a run of torch's tests, before anything else: turns the rules on there.

The folder of this file is put on PYTHONPATH. The processes that torch's tests start inherit it, whatever starts them.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

RULES = "HOLDFAST_TORCH_TESTS_RULES"  # "1": with the rules
RANKS = "HOLDFAST_TORCH_TESTS_RANKS"  # a file; each rank that joins a process group appends a line: on or off
TRIGGER = "torch.testing._internal.common_utils"  # every test of torch imports it, and only tests do


class _Then(Loader):
    """Load a module as its own loader does, then set the process up."""

    def __init__(self, inner: Any):
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _set_up()


class _Finder(MetaPathFinder):
    """Find the trigger, once."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != TRIGGER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None:
            spec.loader = _Then(spec.loader)
        return spec


def _set_up() -> None:
    if os.environ[RULES] == "1":
        import holdfast.spmd

        left_out = holdfast.spmd.enable()
        if problems := [line for line in left_out if not line.endswith("has no such operator")]:
            raise RuntimeError(f"holdfast.spmd.enable() left out: {'; '.join(problems)}")
    _count_ranks()


def _count_ranks() -> None:
    """Write down of each rank that joins a process group whether the rules are on in its process."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    join = distributed_c10d.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        switch = sys.modules.get("holdfast.spmd.switch")
        with open(os.environ[RANKS], "a") as file:
            file.write("on\n" if switch is not None and switch.SWITCH.is_on else "off\n")
        return join(*args, **kwargs)

    distributed_c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group


if RULES in os.environ:
    sys.meta_path.insert(0, _Finder())
