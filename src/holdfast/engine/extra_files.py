"""Files that a user publishes with a step, such as a tokenizer: reading and checking what was given, encoding it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument
from holdfast.core.names import case_collision, extra_file_problem
from holdfast.plan.state_values import EXTRA_PREFIX, RankValue, extra_value

ExtraFiles = Mapping[str, bytes | bytearray | memoryview | str | os.PathLike[str]] | Callable[[str], Any]


def read_files(given: ExtraFiles, entries: Iterable[str] = ()) -> dict[str, bytes]:
    """Return the bytes of the given files by name; `entries` are the names in the state that is saved with them.

    A mapping has the name of each file and its content: bytes, text, or the `Path` of a file to read. A function is
    called with an empty folder that it fills, as a tokenizer's `save_pretrained` does. Raises InvalidArgument for
    names that Holdfast uses itself or that lead outside of the folder, for pickles, and for too many files or bytes.
    """
    if isinstance(given, Mapping):
        files = {check_name(name): _content(name, content) for name, content in given.items()}
    elif callable(given):
        files = _files_of(given)
    else:
        raise InvalidArgument(
            f"files={type(given).__name__}: give the contents by name, or a function that fills a folder, "
            "such as tokenizer.save_pretrained"
        )
    collision = case_collision(files)
    if collision is not None:
        raise InvalidArgument(f"files: {collision[0]!r} and {collision[1]!r} differ only by case")
    if len(files) > limits.EXTRA_FILES:
        raise InvalidArgument(f"files: {len(files)} files, more than {limits.EXTRA_FILES}")
    folders = {name.lower() for name in entries if isinstance(name, str)}  # averages are saved in one of their own
    own = {name.lower() for name in files}
    for name, data in files.items():
        folder, slash, _ = name.lower().partition("/")
        if folder in folders:
            raise InvalidArgument(f"files: {name!r} has the name of an entry of the state")
        if slash and folder in own:
            raise InvalidArgument(f"files: {name!r} is in a folder with the name of another file")
        if _is_pickle(data):
            raise InvalidArgument(f"files: {name!r} is a pickle, which can run code when it is opened")
    total = sum(map(len, files.values()))
    if total > limits.EXTRA_FILES_BYTES:
        most = limits.EXTRA_FILES_BYTES // limits.MIB
        raise InvalidArgument(f"files: {total} bytes in all, more than {most} MiB; save large data as tensors")
    return files


def check_name(name: Any) -> str:
    """Return the name of a file to publish; raises InvalidArgument if it is not allowed."""
    problem = extra_file_problem(name) if isinstance(name, str) else "is not a text"
    if problem is not None:
        raise InvalidArgument(f"files: {name!r} {problem}")
    return str(name)


def _content(name: str, content: Any) -> bytes:
    if isinstance(content, str):
        if "\n" not in content and os.path.isfile(content):  # noqa: PTH113  (false for a text of any length)
            raise InvalidArgument(f"files: {name!r} is the path of a file as text; give pathlib.Path({content!r})")
        try:
            return content.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"files: {name!r} is no valid text: {error}") from error
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if isinstance(content, os.PathLike):
        return _read(name, Path(content))
    raise InvalidArgument(
        f"files: {name!r} is of type {type(content).__name__}; give bytes, text, or the pathlib.Path of a file"
    )


def _files_of(fill: Callable[[str], Any]) -> dict[str, bytes]:
    """Return the files that a function writes into a folder."""
    with tempfile.TemporaryDirectory(prefix="holdfast-files-") as folder:
        try:
            fill(folder)
        except Exception as error:
            raise InvalidArgument(f"files: the function raised {type(error).__name__}: {error}") from error
        paths = sorted(path for path in Path(folder).rglob("*") if not path.is_dir())
        names = {check_name(path.relative_to(folder).as_posix()): path for path in paths}
        return {name: _read(name, path) for name, path in names.items()}


def _read(name: str, path: Path) -> bytes:
    try:
        if path.stat().st_size > limits.EXTRA_FILES_BYTES:
            raise InvalidArgument(f"files: {name!r} has {path.stat().st_size} bytes; save large data as tensors")
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"files: {name!r} cannot be read: {error}") from error


def _is_pickle(data: bytes) -> bool:
    """Return True for a pickle of protocol 2 or later, and for a zip archive that holds one, as torch.save writes."""
    zipped = data[:4] == b"PK\x03\x04" and b"data.pkl" in data
    return zipped or (data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))


class ExtraFileEncoder:
    """Encodes files for the writer. Those with the bytes of the save before are not encoded again."""

    def __init__(self) -> None:
        self._encoded: dict[str, tuple[bytes, RankValue]] = {}

    def values(self, files: Mapping[str, bytes]) -> dict[str, RankValue]:
        """Return the files as values of this rank."""
        before, self._encoded = self._encoded, {}
        for name, data in files.items():
            known = before.get(name)
            value = known[1] if known is not None and known[0] == data else extra_value(data)
            self._encoded[name] = data, value
        return {EXTRA_PREFIX + name: value for name, (_, value) in self._encoded.items()}
