import json
import os

import numpy as np
import pytest
import safetensors.numpy
import torch

import holdfast
from holdfast.core.errors import Damaged, NotFound
from tests.cli.calls import call

MODEL = "model-00001-of-00001.safetensors"


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_good_checkpoint_is_good(step):
    done = call("verify", step)
    manifest = holdfast.open(step).manifest
    assert done.exit_code == 0
    assert done.output == f"{step}: 7 files, {manifest.total_bytes / 1000:.2f} kB: good\n"


def test_all_steps_of_a_root_are_verified(run, step):
    done = call("verify", run)
    assert done.exit_code == 0 and len(done.output.splitlines()) == 3
    assert call("verify", step).output in done.output
    (run / "step-000000000002" / "holdfast.json").write_text("{}")
    done = call("verify", run)
    assert done.exit_code == 1 and "step-000000000002" in done.output and "not a Holdfast manifest" in done.output
    answers = json.loads(call("verify", run, "--json").output)
    assert [answer["good"] for answer in answers] == [False, True, True]


def test_json_of_a_good_checkpoint(step):
    done = call("verify", step, "--json")
    total = holdfast.open(step).manifest.total_bytes
    assert done.exit_code == 0
    assert json.loads(done.output) == {"path": str(step), "good": True, "files": 7, "bytes": total, "damage": []}


def test_a_flipped_bit_is_found_and_the_keys_of_its_block_are_named(step):
    flip(step / MODEL, -1)
    done = call("verify", step)
    assert done.exit_code == 1
    size = (step / MODEL).stat().st_size
    lines = done.output.splitlines()
    assert lines[0] == f"DAMAGED {MODEL} at 0 ({size} bytes): the digest does not match"
    assert lines[1:3] == ["  affects 0-1.bias", "  affects 0-1.weight"]
    assert lines[3].endswith(": damaged in 1 place")


def test_only_the_keys_of_the_damaged_block_are_named(tmp_path):
    tensors = {name: torch.zeros(4096, dtype=torch.uint8) for name in "abcd"}
    holdfast.save(tmp_path / "c", {"model": tensors}, block_bytes=4096)
    place = holdfast.open(tmp_path / "c").find("c").recipe.sources()[0]
    flip(tmp_path / "c" / MODEL, place.end - 1)
    (damage,) = json.loads(call("verify", tmp_path / "c", "--json").output)["damage"]
    assert damage["keys"] == ["c", "d"]
    assert damage["offset"] == (place.end - 1) // 4096 * 4096


def test_every_flipped_byte_of_every_file_is_found(step):
    for name in holdfast.open(step).manifest.files:
        good = (step / name).read_bytes()
        for offset in range(0, len(good), max(1, len(good) // 25)):
            flip(step / name, offset)
            report = holdfast.open(step).verify()
            assert [damage.file for damage in report.damage] == [name], (name, offset)
            (step / name).write_bytes(good)
    assert holdfast.open(step).verify().good


def test_a_flipped_bit_of_the_header_names_the_keys_from_the_index(step):
    flip(step / MODEL, 30)
    done = call("verify", step)
    assert done.exit_code == 1
    assert "  affects 0-1.weight" in done.output


def test_a_missing_file_is_found_with_its_keys(step):
    (step / MODEL).unlink()
    done = call("verify", step)
    assert done.exit_code == 1
    assert f"DAMAGED {MODEL}: {step}/{MODEL} is missing; the manifest records " in done.output
    assert "  affects 0-1.weight" in done.output


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_found(step, change):
    size = (step / MODEL).stat().st_size
    os.truncate(step / MODEL, size + change)
    done = call("verify", step)
    assert done.exit_code == 1
    assert f"{MODEL} has {size + change} bytes, but the manifest records {size}" in done.output


def test_all_damage_is_found_and_not_only_the_first(step):
    flip(step / MODEL, -1)
    flip(step / "state.json", 5)
    (step / "odd.safetensors.index.json").unlink()
    done = call("verify", step, "--json")
    assert done.exit_code == 1
    fields = json.loads(done.output)
    assert fields["good"] is False
    assert {damage["file"] for damage in fields["damage"]} == {MODEL, "state.json", "odd.safetensors.index.json"}


def test_swapped_files_of_two_steps_are_found(run, step):
    for name in ("state.json", "holdfast.json"):
        assert (step / name).read_bytes() != (run / "step-000000000010" / name).read_bytes()
    os.replace(run / "step-000000000010" / "state.json", step / "state.json")
    assert call("verify", step).exit_code == 1


def test_a_damaged_manifest_is_damage(step):
    flip(step / "holdfast.json", 40)
    assert isinstance(call("verify", step).exception, Damaged)


def test_a_fifo_in_place_of_a_file_is_found_and_nobody_waits(step):
    (step / MODEL).unlink()
    os.mkfifo(step / MODEL)
    done = call("verify", step)  # or it would wait for ever
    assert done.exit_code == 1
    assert f"DAMAGED {MODEL}: {step}/{MODEL} is not a regular file" in done.output


def test_a_folder_without_digests_cannot_be_verified(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / "model.safetensors")
    error = call("verify", tmp_path).exception
    assert isinstance(error, NotFound)
    assert str(error) == (
        f"{tmp_path}: a checkpoint in the format Hugging Face has no digests to verify; compare it with another one by "
        "holdfast diff, or convert it with --to holdfast, which writes digests"
    )
    assert call("convert", tmp_path, tmp_path.with_name("b")).exit_code == 0
    assert call("verify", tmp_path.with_name("b")).exit_code == 0


def test_a_folder_without_a_checkpoint_is_not_found(tmp_path):
    assert isinstance(call("verify", tmp_path).exception, NotFound)


def test_control_characters_of_a_path_are_made_visible(step):
    hostile = step.with_name("\x1b[31mred\x07\x9b")
    os.rename(step, hostile)
    (hostile / MODEL).unlink()
    output = call("verify", hostile).output
    assert output.replace("\n", "").isprintable()
    assert r"\x1b[31mred\x07\x9b" in output
