import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import holdfast
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Damaged, HoldfastError, InvalidArgument, Mismatch, NotFound, StorageError
from holdfast.storage.local import LocalWriter
from tests.convert.states import save, state, tensor_files

SMALL: dict[str, Any] = {"block_bytes": 4096, "max_shard_size": 20_000}


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


def test_a_mapping_takes_the_optimizer_along_and_its_reverse_gives_every_byte_back(tmp_path):
    save(tmp_path / "a")
    statements = ["0.weight^T -> first.kernel", "0.bias -> z.bias", "2.weight -> last.a, last.b, axis=1"]
    there = ConvertOptions(mapping=MappingOptions(statements), **SMALL)
    convert(tmp_path / "a", tmp_path / "b", there)
    a, b = holdfast.open(tmp_path / "a"), holdfast.open(tmp_path / "b")
    assert b.keys("model") == ["1.bias", "1.weight", "2.bias", "first.kernel", "last.a", "last.b", "z.bias"]
    for of in ("", "/exp_avg", "/exp_avg_sq"):
        group = "optimizer" if of else "model"
        assert np.array_equal(b.read(f"first.kernel{of}", group), a.read(f"0.weight{of}", group).T)
        assert np.array_equal(b.read(f"last.b{of}", group), a.read(f"2.weight{of}", group)[:, 32:])
    assert "last.b" in b.state["optimizer"]["groups"][0]["params"]
    back = ConvertOptions(mapping=MappingOptions(statements, reverse=True), **SMALL)
    convert(tmp_path / "b", tmp_path / "c", back)
    assert tensor_files(tmp_path / "c") == tensor_files(tmp_path / "a")
    assert (tmp_path / "c" / "state.json").read_bytes() == (tmp_path / "a" / "state.json").read_bytes()


def test_scalars_that_become_one_must_be_equal(tmp_path):
    saved = state()
    saved["optimizer"].state[saved["model"][0].bias]["step"] += 1
    holdfast.save(tmp_path / "a", saved)
    joined = ConvertOptions(mapping=MappingOptions(["0.bias, 1.bias -> both, axis=0"]))
    with pytest.raises(Mismatch, match="optimizer: both/step is merged from several tensors with different values"):
        convert(tmp_path / "a", tmp_path / "b", joined)
    assert os.listdir(tmp_path) == ["a"]


def test_an_initial_value_cannot_be_kept_offline(tmp_path):
    save(tmp_path / "a")
    with pytest.raises(HoldfastError, match="new"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions(mapping=MappingOptions(["_ -> new"])))


def test_a_destination_with_the_name_of_a_step_holds_that_step(tmp_path):
    save(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "run" / "step-000000000100", ConvertOptions())
    assert holdfast.open(tmp_path / "run" / "step-000000000100").step == 100
    fresh = state()
    assert holdfast.Checkpointer(tmp_path / "run").restore(fresh) == 100


def test_dtype_casts_the_model_alone(tmp_path):
    save(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(dtype="bfloat16"))
    a, b = holdfast.open(tmp_path / "a"), holdfast.open(tmp_path / "b")
    expected = torch.from_numpy(a.read("0.weight")).to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(b.read("0.weight").view("u2")).view(torch.bfloat16), expected)
    assert b.read("0.weight/exp_avg").dtype == np.float32
    assert np.array_equal(b.read("wave"), a.read("wave"))


def test_side_files_of_a_plain_folder_go_along_and_the_config_says_the_dtype(tmp_path):
    source = tmp_path / "hub"
    source.mkdir()
    safetensors.numpy.save_file({"a.weight": np.arange(6, dtype=np.float32)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"torch_dtype": "float32", "text_config": {"dtype": "float32"}}))
    (source / "tokenizer.json").write_text("{}")
    (source / "secret.bin").write_bytes(b"not a side file")
    convert(source, tmp_path / "b", ConvertOptions(dtype="float16"))
    names = sorted(os.listdir(tmp_path / "b"))
    assert "tokenizer.json" in names and "secret.bin" not in names
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config == {"torch_dtype": "float16", "text_config": {"dtype": "float16"}}
    assert holdfast.open(tmp_path / "b").verify().good


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_damage_stops_the_conversion_names_the_key_and_leaves_nothing(tmp_path, position):
    save(tmp_path / "a")
    place = holdfast.open(tmp_path / "a").places["model"]["0.weight"]
    at = {"first": place.begin, "middle": (place.begin + place.end) // 2, "last": place.end - 1}[position]
    path = tmp_path / "a" / place.file
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(Damaged, match=rf"{place.file}: the digest of the block at .* It holds .*0\.weight"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions())
    assert os.listdir(tmp_path) == ["a"]
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(verify=False))
    assert holdfast.open(tmp_path / "b").verify().good
    # What is not touched is not read: damage elsewhere does not matter.
    convert(tmp_path / "a", tmp_path / "c", ConvertOptions(only=("odd",)))


def test_a_source_that_is_cut_short_is_damage(tmp_path):
    source = tmp_path / "hub"
    source.mkdir()
    safetensors.numpy.save_file({"a": np.zeros(4096, np.float32)}, source / "model.safetensors")
    os.truncate(source / "model.safetensors", (source / "model.safetensors").stat().st_size - 8)
    with pytest.raises(Damaged):
        convert(source, tmp_path / "b", ConvertOptions())
    assert sorted(os.listdir(tmp_path)) == ["hub"]


def test_an_existing_folder_is_refused_and_replaced_with_force(tmp_path):
    save(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(only=("model",)))
    with pytest.raises(InvalidArgument, match="exists; choose another folder, or replace it with --force"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions())
    assert holdfast.open(tmp_path / "b").groups == ("model",)
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(force=True, to="hf", only=("model",)))
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(force=True))
    assert len(holdfast.open(tmp_path / "b").groups) == 3
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_force_never_deletes_what_is_not_a_checkpoint(tmp_path):
    save(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.doc").write_text("years")
    with pytest.raises(StorageError, match=r"thesis\.doc and is not a checkpoint"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions(force=True))
    (tmp_path / "c").write_text("a file")
    with pytest.raises(StorageError, match="is a file"):
        convert(tmp_path / "a", tmp_path / "c", ConvertOptions(force=True))
    assert (tmp_path / "b" / "thesis.doc").read_text() == "years" and (tmp_path / "c").read_text() == "a file"


def test_the_newest_step_of_a_run_is_taken(tmp_path):
    for step in (3, 20):
        holdfast.save(tmp_path / "run" / f"step-{step:012d}", state(), step=step)
    assert convert(tmp_path / "run", tmp_path / "b", ConvertOptions()).path == str(tmp_path / "b")
    assert holdfast.open(tmp_path / "b").step == 20
    with pytest.raises(NotFound, match="no such file or folder"):
        convert(tmp_path / "none", tmp_path / "c", ConvertOptions())


BIG = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background inherits that it is ignored
from holdfast.convert.run import ConvertOptions, convert
from holdfast.convert.mapping import MappingOptions
assert "torch" not in sys.modules
mapping = MappingOptions(sys.argv[3:]) if sys.argv[3:] else MappingOptions()
convert(sys.argv[1], sys.argv[2], ConvertOptions(mapping=mapping))
assert "torch" not in sys.modules
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1000)
"""


def start_big(source, target, *statements):
    command = [sys.executable, "-c", BIG, str(source), str(target), *statements]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A checkpoint of 800 MB, much more than a conversion may hold."""
    path = tmp_path_factory.mktemp("big") / "a"
    values = torch.arange(2**26, dtype=torch.int32).to(torch.float32)
    tensors = {"wide": values.view(2**11, 2**15), "tall": values.flip(0).view(2**15, 2**11), "flat": values.view(2**26)}
    holdfast.save(path, {"model": tensors})
    return path


@pytest.mark.full
@pytest.mark.parametrize("statements", [["wide, wide -> both, axis=1"], [], ["wide^T -> wide", "tall^T -> tall"]])
def test_memory_is_bounded_whatever_the_mapping(big, tmp_path, statements):
    process = start_big(big, tmp_path / "b", *statements)
    peak = float(process.communicate(timeout=120)[0])
    assert process.returncode == 0
    assert peak < 330, f"{peak} MB"
    if statements[1:]:
        a, b = holdfast.open(big), holdfast.open(tmp_path / "b")
        assert np.array_equal(b.read("wide"), a.read("wide").T) and np.array_equal(b.read("tall"), a.read("tall").T)


def wait_for_attempt(folder, process):
    end = time.monotonic() + 60
    while not list(folder.glob(".attempt-*/model-*")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    time.sleep(0.02)


def test_a_killed_conversion_leaves_no_folder_and_the_next_one_sweeps(big, tmp_path):
    with start_big(big, tmp_path / "b") as process:
        wait_for_attempt(tmp_path, process)
        process.send_signal(signal.SIGKILL)
    left = os.listdir(tmp_path)
    assert "b" not in left and any(name.startswith(".attempt-") for name in left)
    save(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions())
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert holdfast.open(tmp_path / "b").verify().good


def test_what_a_killed_replacement_left_is_deleted(tmp_path):
    """A replaced checkpoint is renamed, then deleted; a kill in between leaves its data."""
    save(tmp_path / "a")
    left = tmp_path / ".removed-attempt-0123456789abcdef-01234567"
    left.mkdir()
    (left / "model-00001.safetensors").write_bytes(bytes(100))
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(**SMALL))
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_an_interrupt_leaves_nothing(big, tmp_path):
    with start_big(big, tmp_path / "b") as process:
        wait_for_attempt(tmp_path, process)
        process.send_signal(signal.SIGINT)
    assert process.returncode != 0
    assert os.listdir(tmp_path) == []


def test_a_living_conversion_is_not_swept(big, tmp_path):
    with start_big(big, tmp_path / "b") as process:
        wait_for_attempt(tmp_path, process)
        process.send_signal(signal.SIGSTOP)
        try:
            save(tmp_path / "a")
            convert(tmp_path / "a", tmp_path / "c", ConvertOptions())
        finally:
            process.send_signal(signal.SIGCONT)
        process.communicate(timeout=120)
    assert process.returncode == 0
    assert holdfast.open(tmp_path / "b").verify().good and sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_a_full_disk_or_a_failing_write_leaves_nothing(tmp_path, monkeypatch):
    save(tmp_path / "a")
    before = set(threading.enumerate())  # the common pool for objects may be there, of another test

    def fail(self, offset, buffers):
        raise StorageError("writing: No space left on device")

    monkeypatch.setattr(LocalWriter, "write", fail)
    with pytest.raises(StorageError, match="No space left"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions())
    assert os.listdir(tmp_path) == ["a"]
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("holdfast-")]


def test_damage_in_the_only_block_is_found_before_anything_is_published(tmp_path):
    holdfast.save(tmp_path / "a", {"model": {"w": torch.arange(1000.0)}})
    path = tmp_path / "a" / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match="It holds w"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions())
    assert os.listdir(tmp_path) == ["a"]
