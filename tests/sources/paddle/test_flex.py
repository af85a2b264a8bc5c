"""Paddle's flex checkpoint: what ranks wrote in parts is whole again, bit for bit."""

from __future__ import annotations

import pickle
import shutil
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from holdfast.core.errors import Damaged, Unsupported
from holdfast.sources import open_stored
from tests.effort import at_most
from tests.sources.paddle.folders import GOLDEN, check_truth, random_matrix

MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"


@dataclass(frozen=True)
class LocalTensorMetadata:
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    global_shape: tuple[int, ...] | None = None
    is_flattened: bool = False
    flattened_range: tuple[int, int] | None = None


@dataclass(frozen=True)
class LocalTensorIndex:
    tensor_key: str
    global_offset: tuple[int, ...]
    is_flattened: bool = False
    flattened_range: tuple[int, int] | None = None


@dataclass
class Metadata:
    state_dict_metadata: dict[str, list[LocalTensorMetadata]]
    storage_metadata: dict[LocalTensorIndex, str]
    flat_mapping: dict[str, tuple[str, ...]]


@pytest.fixture
def as_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above under the names that they have in Paddle, for pickle to write."""
    module: Any = types.ModuleType(MODULE)
    for made in (LocalTensorMetadata, LocalTensorIndex, Metadata):
        monkeypatch.setattr(made, "__module__", MODULE)
        setattr(module, made.__name__, made)
    names = MODULE.split(".")
    for count in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:count]), types.ModuleType(".".join(names[:count])))
    monkeypatch.setitem(sys.modules, MODULE, module)


def write(folder: Path, parts: list[tuple[str, tuple[int, ...], Any]], shapes: dict[str, tuple[int, ...]]) -> None:
    """One file for each part (key, offset, array)."""
    folder.mkdir(parents=True)
    described: dict[str, list[LocalTensorMetadata]] = {}
    located = {}
    for number, (key, offset, array) in enumerate(parts):
        piece = LocalTensorMetadata(offset, array.shape, str(array.dtype), shapes.get(key))
        described.setdefault(key, []).append(piece)
        located[LocalTensorIndex(key, offset)] = f"{number}_0.distcp"
        (folder / f"{number}_0.distcp").write_bytes(pickle.dumps({key: array}, 4))
    metadata = Metadata(described, located, {key: (key,) for key in described})
    (folder / "0.metadata").write_bytes(pickle.dumps(metadata, 4))


@pytest.mark.parametrize("folder", ["flex_two_ranks", "flex_two_ranks_safetensors"])
def test_what_two_ranks_of_paddle_wrote_has_its_true_values(folder: str) -> None:
    assert check_truth(GOLDEN / folder, GOLDEN / "truth_flex_two_ranks.npz") == 9
    narrow = open_stored(GOLDEN / folder).read("narrow.weight")
    assert narrow.dtype == ml_dtypes.bfloat16


def test_a_folder_of_one_rank() -> None:
    checkpoint = open_stored(GOLDEN / "flex_model_state")
    embedding = checkpoint.read("model.embed_tokens.weight")
    assert embedding.dtype == ml_dtypes.bfloat16
    assert np.array_equal(embedding.astype(np.float32), np.arange(32, dtype=np.float32).reshape(8, 4))
    assert checkpoint.read("model.norm.weight").dtype == np.float32


@pytest.mark.usefixtures("as_paddle")
def test_folders_of_model_optimizer_and_masters_are_groups(tmp_path: Path) -> None:
    weight, moment = random_matrix(1, 4, 6), random_matrix(2, 4, 6)
    write(tmp_path / "c" / "model_state", [("fc.weight", (0, 0), weight.astype(np.float16))], {})
    write(tmp_path / "c" / "master_weight", [("fc.weight.w_0", (0, 0), weight)], {})
    write(tmp_path / "c" / "optimizer_state", [("fc.weight.moment1_0", (0, 0), moment)], {})
    checkpoint = open_stored(tmp_path / "c")
    assert checkpoint.groups == ("model", "master_weights", "optimizer")
    assert np.array_equal(checkpoint.read("fc.weight", "master_weights"), weight)
    assert np.array_equal(checkpoint.read("fc.weight/moment1_0"), moment)


@pytest.mark.usefixtures("as_paddle")
def test_parts_may_repeat_one_another_and_must_leave_no_hole(tmp_path: Path) -> None:
    whole = random_matrix(1, 4, 6)
    top, middle, bottom = ("w", (0, 0), whole[:2]), ("w", (1, 0), whole[1:3]), ("w", (2, 0), whole[2:])
    write(tmp_path / "repeated", [top, middle, bottom], {"w": (4, 6)})
    assert np.array_equal(open_stored(tmp_path / "repeated").read("w"), whole)
    write(tmp_path / "hole", [top, ("w", (3, 0), whole[3:])], {"w": (4, 6)})
    with pytest.raises(Damaged, match=r"\[2:3, 0:6\]"):
        open_stored(tmp_path / "hole")
    write(tmp_path / "without a shape", [top, bottom], {})
    assert np.array_equal(open_stored(tmp_path / "without a shape").read("w"), whole)


@pytest.mark.usefixtures("as_paddle")
def test_a_part_that_is_not_what_the_metadata_says_is_damage(tmp_path: Path) -> None:
    write(tmp_path / "c", [("w", (0, 0), random_matrix(1, 4, 6))], {})
    for array, said in ((random_matrix(1, 6, 4), r"\[6, 4\]"), (random_matrix(1, 4, 6).astype("f8"), "float64")):
        (tmp_path / "c" / "0_0.distcp").write_bytes(pickle.dumps({"w": array}, 4))
        with pytest.raises(Damaged, match=said):
            open_stored(tmp_path / "c")
    (tmp_path / "c" / "0_0.distcp").write_bytes(pickle.dumps({"other": array}, 4))
    with pytest.raises(Damaged, match="does not hold 'w'"):
        open_stored(tmp_path / "c")
    (tmp_path / "c" / "0_0.distcp").unlink()
    with pytest.raises(Damaged, match="is missing"):
        open_stored(tmp_path / "c")


def test_the_newest_of_several_saves_is_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "flex_model_state", tmp_path / "c")
    (tmp_path / "c" / "9.metadata").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(Unsupported, match=r"os\.system"):
        open_stored(tmp_path / "c")


@pytest.mark.usefixtures("as_paddle")
def test_thousands_of_parts_that_overlap_are_refused_at_once(tmp_path: Path) -> None:
    """A small file can claim them all: each would be cut along the borders of all others."""
    folder, count = tmp_path / "c", 5_000
    folder.mkdir()
    (folder / "0_0.distcp").write_bytes(pickle.dumps({"w": random_matrix(1, 2)}, 4))
    described = {"w": [LocalTensorMetadata((n,), (2,), "float32", (count + 1,)) for n in range(count)]}
    located = {LocalTensorIndex("w", (n,)): "0_0.distcp" for n in range(count)}
    (folder / "0.metadata").write_bytes(pickle.dumps(Metadata(described, located, {}), 4))
    with at_most(5), pytest.raises(Damaged, match="5000 parts do not cover"):
        open_stored(folder)


@pytest.mark.usefixtures("as_paddle")
def test_paths_that_become_one_key_are_refused(tmp_path: Path) -> None:
    arrays = {"m.a.b": random_matrix(1, 2), "other": random_matrix(2, 2)}
    (tmp_path / "0_0.distcp").write_bytes(pickle.dumps(arrays, 4))
    described = {key: [LocalTensorMetadata((0,), (2,), "float32", (2,))] for key in arrays}
    located = {LocalTensorIndex(key, (0,)): "0_0.distcp" for key in arrays}
    paths = {"m.a.b": ("m", "a.b"), "other": ("m", "a", "b")}
    (tmp_path / "0.metadata").write_bytes(pickle.dumps(Metadata(described, located, paths), 4))
    with pytest.raises(Damaged, match=r"two tensors of m have the key 'a\.b', one of them 'other'"):
        open_stored(tmp_path)
