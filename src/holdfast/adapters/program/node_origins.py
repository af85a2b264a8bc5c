"""Origins of the nodes of an export: module, called function, source line, composite before decomposition."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from torch import fx

from holdfast.adapters.module import clean_key
from holdfast.program.graph import BLOCKS, Origin

_FRAME = re.compile(r'File "([^"]+)", line ([0-9]+)')
_AGAIN = re.compile(r"@[0-9]+$")  # a module that is called more than once
_INSERTED = "_empty_nn_module_stack_from_metadata_hook"
_BLOCK_NAMES = {f"wrap_with_{name.partition('.')[2].replace('set_grad', 'set_grad_enabled')}": name for name in BLOCKS}


class Origins:
    """The origins of the nodes of one export; `modules` collects the class of every module path.

    `composites` are the nodes of the graph before decomposition, if the export decomposes.
    """

    def __init__(self, composites: dict[str, fx.Node] | None = None) -> None:
        self._composites = composites or {}
        self.modules: dict[str, str] = {}

    def of(self, node: fx.Node) -> Origin:
        """Return the origin of a node."""
        source = self._composite_of(node)
        module = self._module(node) or (self._module(source) if source is not None else "")
        line = source_line(node) or (source_line(source) if source is not None else "")
        composite = None if source is None else (source.name, _operator(source))
        return Origin(module, _called(node), line, composite)

    def _module(self, node: fx.Node) -> str:
        stack = [entry for entry in (node.meta.get("nn_module_stack") or {}).values() if entry[0] != _INSERTED]
        for path, kind in stack:
            self.modules.setdefault(
                _path(path), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            )
        return _path(stack[-1][0]) if stack else ""

    def _composite_of(self, node: fx.Node) -> fx.Node | None:
        """Return the node of the graph before decomposition that this one comes from."""
        names = [name for source in node.meta.get("from_node") or () for name in _chain(source)]
        return next((self._composites[name] for name in reversed(names) if name in self._composites), None)


def _chain(source: Any) -> Iterator[str]:
    yield source.name
    for older in source.from_node:
        yield from _chain(older)


def _path(path: str) -> str:
    return clean_key(_AGAIN.sub("", path))


def _operator(node: fx.Node) -> str:
    name = str(node.target)
    return _BLOCK_NAMES.get(name, name)


def _called(node: fx.Node) -> str:
    """Return the function of Python that was called, such as "linear"."""
    named = node.meta.get("torch_fn")
    return str(named[1]).partition(".")[2] if named else ""


def source_line(node: fx.Node) -> str:
    """Return the file and line of a node: below site-packages with its folders, else the name of the file."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    path, line = frames[-1]
    parts = PurePath(path).parts
    for root in ("site-packages", "dist-packages"):
        if root in parts:
            return f"{'/'.join(parts[parts.index(root) + 1 :])}:{line}"
    return f"{parts[-1]}:{line}"
