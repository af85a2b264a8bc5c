"""Paddle's checkpoints as inputs: one file of a folder is changed, the others are good."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import NotFound
from holdfast.format.dtypes import dtype_named
from holdfast.format.safetensors import TensorEntry, encode_header
from holdfast.sources.foreign import Folder, Foreign, InMemoryReader, ReaderResult
from holdfast.sources.paddle.flex import read_flex
from holdfast.sources.paddle.optimizer_names import as_torch
from holdfast.sources.paddle.pdparams import read_params
from holdfast.sources.paddle.pir.exported_program import read_exported
from holdfast.sources.paddle.unified import read_unified
from tests.fuzz.target import Target

GOLDEN = Path(__file__).parents[1] / "golden" / "paddle"
PROGRAMS = GOLDEN.parent / "paddle_program"


class Files:
    """A storage of one folder, whose files can be opened."""

    name = "fuzz"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def pin(self, folder: str) -> Files:
        return self

    def files(self) -> dict[str, int]:
        return {name: len(data) for name, data in self._files.items()}

    def read(self, name: str, limit_bytes: int) -> bytes:
        return self._file(name)

    def open(self, name: str) -> InMemoryReader:
        return InMemoryReader(self._file(name))

    def _file(self, name: str) -> bytes:
        if name not in self._files:
            raise NotFound(f"no {name}")
        return self._files[name]


def _parse(reader: Callable[[Folder], ReaderResult | None], files: Mapping[str, bytes]) -> object:
    """Open a folder, and read some of it."""
    storage: Any = Files(files)
    folder = Folder(storage, "")
    found = reader(folder)
    if found is None:
        return "another format"
    checkpoint = as_torch(Foreign(folder, found))
    some = [(key, group) for group in checkpoint.groups for key in list(checkpoint.keys(group))[:2]]
    return [checkpoint.read(key, group).nbytes for key, group in some]


def _safetensors(tensors: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    entries, data = [], b""
    for key, array in tensors.items():
        dtype = dtype_named(str(array.dtype))
        entries.append(TensorEntry(key, dtype, array.shape, len(data), len(data) + array.nbytes))
        data += array.tobytes()
    return encode_header(entries) + data


def _unified() -> dict[str, bytes]:
    """A square and a narrow matrix with masters and moments, the model turned and as raw bits."""
    masters = {"q_proj.weight": np.eye(2, dtype=np.float32), "up_proj.weight": np.ones((2, 3), np.float32)}
    bits = {key: (value.T.copy().view(np.uint32) >> 16).astype(np.uint16) for key, value in masters.items()}
    states = {f"{key}/{name}_0": value for key, value in masters.items() for name in ("moment1", "moment2")}
    for key in masters:
        states |= {
            f"{key}/beta1_pow_acc_0": np.array([0.9], np.float32),
            f"{key}/beta2_pow_acc_0": np.array([0.999], np.float32),
        }
    files = {}
    for stem, tensors in (("model", bits), ("master_weights", masters), ("optimizer", states)):
        name = f"{stem}-00001-of-00001.safetensors"
        files[name] = _safetensors(tensors)
        index = {"weight_map": dict.fromkeys(tensors, name), "master_weights": True, "optim_shard_num": 1}
        files[f"{stem}.safetensors.index.json"] = json.dumps(index).encode()
    return {**files, "config.json": b'{"dtype":"bfloat16"}', "trainer_state.json": b'{"global_step":3}'}


def _folder(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((GOLDEN / name).iterdir())}


def _target(
    name: str, reader: Callable[[Folder], ReaderResult | None], files: Mapping[str, bytes], changed: str, *more: bytes
) -> Target:
    return Target(name, (files[changed], *more), lambda data: _parse(reader, {**files, changed: data}))


def _header_target(files: Mapping[str, bytes]) -> Target:
    """Changes to the header's JSON come with the length that fits them."""
    changed = "optimizer-00001-of-00001.safetensors"
    plain = _target("paddle-header", read_unified, files, changed)
    size = int.from_bytes(files[changed][:8], "little")
    tail = files[changed][8 + size :]
    return Target(
        plain.name,
        plain.seeds,
        plain.parse,
        lambda data: data[8 : len(data) - len(tail)],
        lambda text: len(text).to_bytes(8, "little") + text + tail,
    )


def _programs() -> tuple[bytes, ...]:
    """Programs of `paddle.jit.save`, which are read and translated."""
    return tuple((PROGRAMS / name / "model.json").read_bytes() for name in ("mlp", "cnn", "specials"))


def paddle_targets() -> tuple[Target, ...]:
    """A target for every kind of file that Paddle writes."""
    unified, flex, params = _unified(), _folder("flex_two_ranks"), _folder("params_bf16")
    old = (GOLDEN / "protocol2.pdparams").read_bytes()
    nested = (GOLDEN / "nested.pdparams").read_bytes()
    return (
        _target("paddle-index", read_unified, unified, "optimizer.safetensors.index.json", b'{"optim_shard_num": 1}'),
        _header_target(unified),
        _target("paddle-metadata", read_flex, flex, "0.metadata"),
        _target("paddle-distcp", read_flex, flex, "1_0.distcp"),
        _target(
            "paddle-pdparams", read_params, {"m.pdparams": params["model_state.pdparams"]}, "m.pdparams", old, nested
        ),
        _target("paddle-pdopt", read_params, params, "optimizer.pdopt"),
        Target("paddle-program", _programs(), lambda data: read_exported(data, "model.json")),
    )
