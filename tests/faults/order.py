"""The order of a commit, as a trace shows it: write < fsync(file) < fsync(folder) < rename < fsync(root)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.cases import Wrong
from tests.faults.strace import Call

_PATHS = re.compile(r'"(?P<name>/[^"]*)"|(?<!AT_FDCWD)<(?P<open>/[^>]*)>')
_WRITES = ("write", "pwrite64", "pwritev", "pwritev2", "fallocate", "ftruncate")
_RENAMES = ("rename", "renameat", "renameat2")


def paths_of(call: Call) -> list[str]:
    return [match["name"] or match["open"] for match in _PATHS.finditer(call.arguments)]


def check_order(calls: list[Call], root: Path, folder: str) -> None:
    """Raise Wrong unless all that was written is durable before the rename, and the rename after it."""
    published, attempt = _publication(calls, root, folder)
    synced: dict[str, list[int]] = {}
    written: dict[str, int] = {}
    for number, call in enumerate(calls):
        path = next(iter(paths_of(call)), "")
        if call.name == "fsync":
            synced.setdefault(path, []).append(number)
        elif path.startswith(f"{attempt}/") and (call.name in _WRITES or "O_CREAT" in call.arguments):
            written[path] = number
    if not any(path.endswith(".safetensors") for path in written):
        raise Wrong("the trace shows no write of a tensor file")
    for path, last in written.items():
        if not any(last < number < published for number in synced.get(path, [])):
            raise Wrong(f"{path} was written and not synced before it was published")
    created = max((number for number, call in enumerate(calls) if _makes(call, attempt)), default=0)
    if not any(created < number < published for number in synced.get(attempt, [])):
        raise Wrong("the folder was not synced before it was published")
    if not any(number > published for number in synced.get(str(root), [])):
        raise Wrong("the root was not synced after the rename")


def _publication(calls: list[Call], root: Path, folder: str) -> tuple[int, str]:
    for number, call in enumerate(calls):
        paths = paths_of(call)
        if call.name in _RENAMES and paths and paths[-1] == str(root / folder):
            return number, next(path for path in paths if path.startswith(f"{root}/.attempt-"))
    raise Wrong(f"the trace shows no rename to {folder}")


def _makes(call: Call, attempt: str) -> bool:
    return "O_CREAT" in call.arguments and any(path.startswith(f"{attempt}/") for path in paths_of(call))


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """What this process asks of `os` meanwhile, written as strace writes it."""
    calls: list[Call] = []
    real = {name: getattr(os, name) for name in ("open", "pwritev", "fsync", "rename")}

    def recorder(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            texts = [_text(argument) for argument in arguments]
            if name == "open" and arguments[1] & os.O_CREAT:
                texts.append("O_CREAT")
            calls.append(Call(0, name, ", ".join(texts)))
            return result

        return call

    try:
        for name, function in real.items():
            setattr(os, name, recorder(name, function))
        yield calls
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def _text(argument: Any) -> str:
    if isinstance(argument, int) and os.path.islink(f"/proc/self/fd/{argument}"):
        return f"{argument}<{os.readlink(f'/proc/self/fd/{argument}')}>"
    return f'"{os.path.abspath(argument)}"' if isinstance(argument, str | os.PathLike) else "..."
