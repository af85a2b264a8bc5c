import os

import torch

import holdfast
from convert.states import save, state, tensor_files
from holdfast.convert.run import ConvertOptions, convert

SMALL = {"block_bytes": 4096, "max_shard_size": 20_000}


def content(folder):
    """All that a checkpoint says, but for who wrote it and when."""
    checkpoint = holdfast.open(folder)
    return checkpoint.manifest.content(), checkpoint.state, checkpoint.manifest.metrics


def test_a_copy_is_what_save_writes(tmp_path):
    save(tmp_path / "a")
    done = convert(tmp_path / "a", tmp_path / "b", ConvertOptions(**SMALL))
    assert len(tensor_files(tmp_path / "a")) > 4
    assert tensor_files(tmp_path / "b") == tensor_files(tmp_path / "a")
    assert content(tmp_path / "b") == content(tmp_path / "a")
    assert holdfast.open(tmp_path / "b").verify().good
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    manifest = holdfast.open(tmp_path / "b").manifest
    assert (done.files, done.bytes) == (
        len(manifest.files) + 1,
        sum(f.stat().st_size for f in (tmp_path / "b").iterdir()),
    )


def test_other_blocks_and_files_are_what_save_writes_with_them(tmp_path):
    save(tmp_path / "a")
    save(tmp_path / "b", block_bytes=1 << 20, max_shard_size="5GB")
    convert(tmp_path / "a", tmp_path / "c", ConvertOptions())
    assert tensor_files(tmp_path / "c") == tensor_files(tmp_path / "b")
    convert(tmp_path / "c", tmp_path / "d", ConvertOptions(**SMALL))
    assert content(tmp_path / "d") == content(tmp_path / "a")


def test_a_conversion_loads_as_the_state_that_was_saved(tmp_path):
    save(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions())
    fresh = state()
    with torch.no_grad():
        for parameter in fresh["model"].parameters():
            parameter.zero_()
    assert holdfast.load(tmp_path / "b", fresh).step == 7
    for a, b in zip(fresh["model"].parameters(), state()["model"].parameters(), strict=True):
        assert torch.equal(a, b)
