"""Imported by every Python process of a run of torch's tests, before anything else: turns the rules on there.

The folder of this file is put on PYTHONPATH. The processes that torch's tests start inherit it, whatever starts them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

RULES = "HOLDFAST_TORCH_TESTS_RULES"  # "1": with the rules
RANKS = "HOLDFAST_TORCH_TESTS_RANKS"  # a file; each rank that joins a process group appends a line: on or off
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.testing._internal.distributed._tensor.common_dtensor",
]


def _enable(_: Any) -> None:
    """Turn the rules on if this run is with them, and count ranks either way."""
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
        switch = sys.modules.get("holdfast.spmd.enable")
        with open(os.environ[RANKS], "a") as file:
            file.write("on\n" if switch is not None and switch.INSTALLED.is_on else "off\n")
        return join(*args, **kwargs)

    distributed_c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group


def _fork_ranks(module: Any) -> None:
    """Start the ranks of a test from a server that has torch imported: four imports per test take most of its time."""
    if multiprocessing.get_start_method(allow_none=True) is not None:
        return  # a rank, or the server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    multiprocessing.set_start_method("forkserver")
    module.MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(context.Process)


AFTER: dict[str, Callable[[Any], None]] = {
    "torch.testing._internal.common_utils": _enable,  # every test of torch imports it, and only tests do
    "torch.testing._internal.common_distributed": _fork_ranks,
}


class _Then(Loader):
    """Load a module as its own loader does, then do what is to be done after it."""

    def __init__(self, inner: Any, after: Callable[[Any], None]):
        self._inner = inner
        self._after = after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._after(module)


class _Finder(MetaPathFinder):
    """Find each module of AFTER, once."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if (after := AFTER.pop(name, None)) is None:
            return None
        spec = find_spec(name)  # asks this finder again, which no longer has the name
        if spec is not None:
            spec.loader = _Then(spec.loader, after)
        return spec


if RULES in os.environ:
    sys.meta_path.insert(0, _Finder())
