"""Small inputs that claim to be large: refused by limits, before anything is allocated."""

import json
import os
import struct
import time
import tracemalloc

import pytest

from attacks.forge import INDEX, MODEL, examine, forge_file, forge_manifest, tensor, tensor_file
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError
from holdfast.format.digest import digest_hex

TERABYTE = 2**40
MEMORY_BYTES = 64 * limits.MIB


def sparse(path, size, start=b""):
    path.write_bytes(start)
    os.truncate(path, size)


def huge_header(folder):
    sparse(folder / "model.safetensors", TERABYTE, struct.pack("<Q", TERABYTE - 8) + b"{")


def header_just_over_the_limit(folder):
    sparse(folder / "model.safetensors", TERABYTE, struct.pack("<Q", limits.HEADER_BYTES + 1) + b"{")


def header_of_zeros(folder):
    sparse(folder / "model.safetensors", TERABYTE, struct.pack("<Q", limits.HEADER_BYTES))


def header_longer_than_the_file(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", limits.HEADER_BYTES) + b"{}")


def only_zeros(folder):
    sparse(folder / "model.safetensors", TERABYTE)


def data_without_tensors(folder):
    sparse(folder / "model.safetensors", TERABYTE, tensor_file({"a": tensor(0, 4)}))


def tensor_larger_than_the_file(folder):
    (folder / "model.safetensors").write_bytes(tensor_file({"a": tensor(0, 2**62)}, b"data"))


def shape_of_rank_a_million(folder):
    (folder / "model.safetensors").write_bytes(tensor_file({"a": tensor(0, 1, [1] * 10**6)}, b"x"))


def shape_whose_product_has_a_thousand_digits(folder):
    (folder / "model.safetensors").write_bytes(tensor_file({"a": tensor(0, 4, [10**18] * 64)}, b"data"))


def number_of_a_million_digits(folder):
    text = b'{"a":{"dtype":"U8","shape":[' + b"9" * 10**6 + b'],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(tensor_file(text, b"data"))


def deep_header(folder):
    (folder / "model.safetensors").write_bytes(tensor_file(b'{"a":' + b"[" * 10**6))


def deep_index(folder):
    (folder / INDEX).write_bytes(b'{"weight_map":' * 10**6)


def huge_index(folder):
    sparse(folder / INDEX, TERABYTE, b"{")


def deep_manifest(folder):
    (folder / "holdfast.json").write_bytes(b"[" * 10**6)


def huge_manifest(folder):
    sparse(folder / "holdfast.json", TERABYTE, b"{")


@pytest.mark.parametrize(
    "bomb",
    [
        huge_header,
        header_just_over_the_limit,
        header_of_zeros,
        header_longer_than_the_file,
        only_zeros,
        data_without_tensors,
        tensor_larger_than_the_file,
        shape_of_rank_a_million,
        shape_whose_product_has_a_thousand_digits,
        number_of_a_million_digits,
        deep_header,
        deep_index,
        huge_index,
        deep_manifest,
        huge_manifest,
    ],
)
def test_a_bomb_in_a_foreign_folder_is_refused_in_little_time_and_memory(foreign, bomb):
    bomb(foreign)
    started = time.process_time()
    with pytest.raises(Damaged) as caught:
        examine(foreign)
    assert time.process_time() - started < 1
    assert len(str(caught.value)) < 4000
    tracemalloc.start()
    try:
        with pytest.raises(Damaged):
            examine(foreign)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES


def test_a_header_of_a_million_tensors_is_refused(foreign):
    text = b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(10**6)) + b"}"
    (foreign / "model.safetensors").write_bytes(tensor_file(text))
    started = time.process_time()
    with pytest.raises(Damaged, match="more than the limit"):
        examine(foreign)
    assert time.process_time() - started < 1


def recorded_as_one_block(name, size):
    """A manifest that takes a file for good, whatever its size."""
    return lambda fields: fields["files"].update({name: {"size": size, "blocks": [[0, size, digest_hex(b"")]]}})


def test_a_sparse_tensor_file_with_a_huge_header_in_a_checkpoint(checkpoint):
    sparse(checkpoint / MODEL, TERABYTE, struct.pack("<Q", TERABYTE - 8) + b"{")
    forge_manifest(checkpoint, recorded_as_one_block(MODEL, TERABYTE))
    started = time.process_time()
    with pytest.raises(Damaged, match="the header claims"):
        examine(checkpoint)
    assert time.process_time() - started < 1


def test_a_sparse_tensor_file_that_the_manifest_does_not_know(checkpoint):
    os.truncate(checkpoint / MODEL, TERABYTE)
    started = time.process_time()
    with pytest.raises(Damaged, match=f"has {TERABYTE} bytes, the manifest says"):
        examine(checkpoint)
    assert time.process_time() - started < 1


def test_a_sparse_state_file_in_a_checkpoint(checkpoint):
    os.truncate(checkpoint / "state.json", TERABYTE)
    forge_manifest(checkpoint, recorded_as_one_block("state.json", TERABYTE))
    started = time.process_time()
    with pytest.raises(Damaged, match="more than the limit"):
        examine(checkpoint)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("name", ["state.json", INDEX])
@pytest.mark.parametrize("text", [b"[" * 10**6, b'{"entries":' * 10**6, b'{"weight_map":{"a":' + b"9" * 10**6 + b"}}"])
def test_deep_or_long_json_in_a_small_file_of_a_checkpoint(checkpoint, name, text):
    forge_file(checkpoint, name, text)
    started = time.process_time()
    with pytest.raises(Damaged):
        examine(checkpoint)
    assert time.process_time() - started < 1


def test_a_block_that_claims_more_than_the_file_has(checkpoint):
    forge_manifest(checkpoint, recorded_as_one_block(MODEL, 2**62))
    started = time.process_time()
    with pytest.raises(Damaged, match="the manifest says"):
        examine(checkpoint)
    assert time.process_time() - started < 1


def test_a_manifest_with_more_files_than_the_limit(checkpoint):
    record = {"size": 0, "blocks": []}
    many = {f"f{number}": record for number in range(limits.MANIFEST_FILES)}
    forge_manifest(checkpoint, lambda fields: fields["files"].update(many))
    with pytest.raises(Damaged, match="files, more than the limit"):
        examine(checkpoint)


def test_a_manifest_from_the_future_is_refused_by_its_version(checkpoint):
    forge_manifest(checkpoint, lambda fields: fields.update(version=[10**6, 0]))
    with pytest.raises(HoldfastError, match=r"format version 1000000\.0; .* install a newer one"):
        examine(checkpoint)


def test_a_manifest_whose_digest_was_not_forged_is_refused(checkpoint):
    fields = json.loads((checkpoint / "holdfast.json").read_bytes())
    fields["step"] = 5
    (checkpoint / "holdfast.json").write_text(json.dumps(fields, separators=(",", ":")) + "\n")
    with pytest.raises(Damaged, match="the manifest's digest is"):
        examine(checkpoint)
