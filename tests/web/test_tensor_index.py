"""Tensors as columns: those of the checkpoint, of every kind; a hundred thousand in bounded time and memory."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Damaged, NotFound
from holdfast.sources import open_stored
from holdfast.storage.local import LocalStorage
from holdfast.web.tensor_index import index_group
from tests.effort import at_most
from tests.web.sample_runs import mixture_keys, write_step


def test_the_tensors_are_those_of_the_checkpoint(tmp_path):
    """Dtypes that a header cannot express, and files that are split, too."""
    state = {"model": {"a": torch.ones(3, 4), "c": torch.ones(5, dtype=torch.complex64), "b.0": torch.ones(())}}
    state["model"] |= {f"many.{number}": torch.ones(100) for number in range(20)}
    checkpoint = holdfast.save(tmp_path / "step", state, max_shard_size=3000)
    (group,) = checkpoint.groups
    assert len(checkpoint.manifest.groups[group].files) > 1
    index = index_group(checkpoint, group)
    assert sorted(index.keys) == sorted(checkpoint.keys(group))
    for key in index.keys:
        tensor, found = index.find(key), checkpoint.find(key, group)
        place = found.recipe.sources()[0]
        assert (tensor.dtype, tensor.shape, tensor.bytes) == (found.logical, found.logical_shape, found.bytes), key
        assert (tensor.file, tensor.begin, tensor.end) == (place.file, place.begin, place.end), key
    assert index.find("missing") is None


def test_another_format_is_indexed(tmp_path):
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    index = index_group(open_stored(tmp_path), "model")
    assert (index.keys, index.at(0).shape, index.at(0).file) == (["a.weight"], (2, 2), "model.safetensors")


def test_levels_count_what_is_below(tmp_path):
    arrays = {key: np.ones(2, np.float32) for key in ("l.0.a", "l.0.b.c", "l.0", "l.1.a", "m")}
    index = index_group(Checkpoint(LocalStorage(tmp_path), write_step(tmp_path, 1, {"model": arrays}).name), "model")
    level = index.level("l")
    assert {name: (item.own is not None, len(item.below), item.size) for name, item in level.items()} == {
        "0": (True, 2, 16), "1": (False, 1, 8)
    }  # fmt: skip
    assert index.children(level["0"]) == 2
    assert index.look(level["0"]) != index.look(level["1"])
    with pytest.raises(NotFound):
        index.level("nothing")


def test_parts_without_a_name_are_not_levels(tmp_path):
    """Each row that can be unfolded has a prefix of its own, and unfolding ends."""
    keys = ["..", ".", ".a.b", "a..b", "a.", "a.c.d", "a.c.e", "..."]
    arrays = {key: np.ones(2, np.float32) for key in keys}
    index = index_group(Checkpoint(LocalStorage(tmp_path), write_step(tmp_path, 1, {"model": arrays}).name), "model")
    found, waiting = [], [""]
    while waiting:
        prefix = waiting.pop()
        for name, item in index.level(prefix).items():
            found += [] if item.own is None else [index.keys[item.own]]
            if item.below:
                assert name
                waiting.append(f"{prefix}.{name}" if prefix else name)
    assert sorted(found) == sorted(keys)


def test_layers_with_other_names_below_do_not_look_alike(tmp_path):
    arrays = {key: np.ones(2, np.float32) for key in ("l.0.a", "l.1.b", "l.2.b")}
    index = index_group(Checkpoint(LocalStorage(tmp_path), write_step(tmp_path, 1, {"model": arrays}).name), "model")
    level = index.level("l")
    assert index.look(level["0"]) != index.look(level["1"]) == index.look(level["2"])


def test_a_damaged_header_is_named(tmp_path):
    path = write_step(tmp_path, 1, {"model": {"a": np.ones(2, np.float32)}})
    file = path / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"a"', b'"b"'))
    with pytest.raises(Damaged, match="digest"):
        index_group(Checkpoint(LocalStorage(tmp_path), path.name), "model")


@pytest.mark.sliced(2)
@pytest.mark.parametrize("layers", [6, 61])
def test_a_hundred_thousand_tensors_take_little_time(tmp_path, layers):
    arrays = dict.fromkeys(mixture_keys(layers), np.zeros(2, np.float32))
    path = write_step(tmp_path, 1, {"model": arrays})
    checkpoint = Checkpoint(LocalStorage(tmp_path), path.name)
    with at_most(2.0):
        index = index_group(checkpoint, "model")
        level = index.level("model.layers")
        assert len({index.look(item) for item in level.values()}) == 1
    assert (len(index), len(level)) == (len(arrays), layers)
