"""Readers of foreign checkpoints as the fuzzer calls them: an input is a file, or a folder packed into one."""

from __future__ import annotations

import collections
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import NotFound
from holdfast.sources.dcp.dcp_folder import read_dcp
from holdfast.sources.foreign import Folder, Foreign, InMemoryReader, ReaderResult
from holdfast.sources.huggingface import read_huggingface
from holdfast.sources.pickles import array_of, is_array, read_pickle
from holdfast.sources.torch_save.torch_file import read_torch
from holdfast.sources.torch_save.torch_names import TORCH_NAMES

SEEDS = Path(__file__).parent / "seeds"
Parse = Callable[[bytes], object]


class InMemory:
    """A storage of one folder of files in memory."""

    name = "fuzz"

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def pin(self, folder: str) -> InMemory:
        return self

    def files(self) -> dict[str, int]:
        return {name: len(data) for name, data in self._files.items()}

    def open(self, name: str) -> InMemoryReader:
        if name not in self._files:
            raise NotFound(f"no {name}")
        return InMemoryReader(self._files[name])

    def read(self, name: str, limit_bytes: int) -> bytes:
        self.open(name)
        return self._files[name]


def examine(read: Callable[[Folder], ReaderResult | None], files: dict[str, bytes]) -> object:
    """Open a folder and read all that it holds, unless that is more than its files are."""
    storage: Any = InMemory(files)
    folder = Folder(storage, "")
    found = read(folder)
    if found is None:
        return "not this format"
    checkpoint = Foreign(folder, found)
    for group in checkpoint.groups:
        for key in checkpoint.keys(group):
            checkpoint.read(key, group)
    return [checkpoint.value(name) for name, entry in checkpoint.state.items() if "value" in entry]


def _pickle(data: bytes) -> object:
    value = read_pickle(InMemoryReader(data), "fuzz", TORCH_NAMES, persistent=repr).value
    return array_of(value, "fuzz") if is_array(value) else value


def _torch(data: bytes) -> object:
    return examine(read_torch, {"pytorch_model.bin": data})


def _dcp(data: bytes) -> object:
    size = struct.unpack("<I", data[:4].ljust(4, b"\0"))[0]
    return examine(read_dcp, {".metadata": data[4 : 4 + size], "__0_0.distcp": data[4 + size :]})


def _huggingface(data: bytes) -> object:
    return examine(read_huggingface, {"model.safetensors": data})


def _pickles() -> tuple[bytes, ...]:
    value = {"a": [1, 2.5, None, (True, "é")], 2: collections.OrderedDict(x=b"y"), "s": {1}, "n": np.float32(1)}
    array = np.arange(4).reshape(2, 2)
    return tuple(pickle.dumps(item, protocol) for item in (value, array) for protocol in range(6))


def _header() -> bytes:
    text = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    return struct.pack("<Q", len(text)) + text + bytes(8)


def foreign_targets() -> tuple[tuple[str, tuple[bytes, ...], Parse], ...]:
    """Name, seeds and parser of each."""
    seed = {name: (SEEDS / f"{name}.seed").read_bytes() for name in ("torch", "legacy", "dcp")}
    return (
        ("pickle", _pickles(), _pickle),
        ("torch", (seed["torch"], seed["legacy"]), _torch),
        ("dcp", (seed["dcp"],), _dcp),
        ("safetensors", (_header(),), _huggingface),
    )
