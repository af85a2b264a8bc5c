"""Hostile headers in a whole checkpoint, and what the safetensors reader takes that ours decides on."""

import json

import pytest
from safetensors import safe_open

import holdfast
from holdfast.core.errors import Damaged
from holdfast.format.safetensors import decode_header, header_bytes
from tests.attacks.attack import lay_out, problem_of
from tests.attacks.headers import ATTACKS, A, packed, tensor, text_of, with_field, with_text


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_hostile_header_is_refused_by_every_reader(original, tmp_path, attack):
    assert problem_of(attack, lay_out(attack, original, tmp_path)) == ""


def taken_by_safetensors(data, path):
    path.write_bytes(data)
    with safe_open(path, "np") as file:
        return list(file.keys())


OURS_REFUSES = {
    "a key twice, the last wins": with_text("{" + A + "," + A + "}", b"abcd"),
    "a field that nobody knows": with_field("stride", [1]),
    "an empty key": packed(text_of({"": tensor(0, 4)})) + b"abcd",
    "a key with a newline": packed(text_of({"a\nb": tensor(0, 4)})) + b"abcd",
    "a key with NUL": packed(text_of({"a\0b": tensor(0, 4)})) + b"abcd",
    "a key that clears the terminal": packed(text_of({"\x1b[2J": tensor(0, 4)})) + b"abcd",
    "a key of 2 KiB": packed(text_of({"k" * 2048: tensor(0, 4)})) + b"abcd",
    "a rank of 65": with_field("shape", [1] * 64 + [4]),
    "leading spaces": with_text("  {" + A + "}", b"abcd"),
}


@pytest.mark.parametrize("name", OURS_REFUSES)
def test_what_safetensors_takes_and_ours_refuses(tmp_path, name):
    data = OURS_REFUSES[name]
    assert taken_by_safetensors(data, tmp_path / "model.safetensors")
    with pytest.raises(Damaged):
        decode_header(data[: header_bytes(data[:8], len(data), "w")], len(data), "w")
    with pytest.raises(Damaged):
        holdfast.open(tmp_path).keys()


def test_a_key_that_looks_like_a_path_is_taken_by_both_and_is_no_path(tmp_path):
    (tmp_path / "c").mkdir()
    data = packed(text_of({"../../etc/x": tensor(0, 4)})) + b"abcd"
    assert taken_by_safetensors(data, tmp_path / "c" / "model.safetensors") == ["../../etc/x"]
    assert holdfast.open(tmp_path / "c").read("../../etc/x").tobytes() == b"abcd"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_more_tensors_than_the_limit_are_taken_by_safetensors_and_refused_by_ours(tmp_path):
    entries = {f"{number:x}": tensor(0, 0) for number in range(200_001)}
    data = packed(json.dumps(entries, separators=(",", ":")).encode())
    assert len(taken_by_safetensors(data, tmp_path / "model.safetensors")) == 200_001
    with pytest.raises(Damaged, match="more than the limit"):
        holdfast.open(tmp_path).keys()
