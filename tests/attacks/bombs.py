"""Bombs: small inputs that claim to be large, or take long to read."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from holdfast.core import limits
from holdfast.format.digest import digest_hex
from tests.attacks.attack import Attack
from tests.attacks.forge import INDEX, MODEL, forge_file, forge_manifest, index, tensor, tensor_file

SINGLE = "model.safetensors"
LARGEST = (2**50, 2**46, 2**43, 2**40)  # a petabyte, or what the file system can hold


def sparse(path: Path, start: bytes = b"", size: int | None = None) -> int:
    """A file that claims to be huge; returns its size."""
    path.write_bytes(start)
    for claimed in (size,) if size is not None else LARGEST:
        try:
            os.truncate(path, claimed)
        except OSError:
            continue
        return claimed
    raise OSError(f"{path}: the file system has no sparse files")


def huge_header(folder: Path) -> None:
    size = sparse(folder / SINGLE)
    with (folder / SINGLE).open("r+b") as file:
        file.write(struct.pack("<Q", size - 8) + b"{")


def header_just_over_the_limit(folder: Path) -> None:
    sparse(folder / SINGLE, struct.pack("<Q", limits.HEADER_BYTES + 1) + b"{")


def header_of_zeros(folder: Path) -> None:
    sparse(folder / SINGLE, struct.pack("<Q", limits.HEADER_BYTES))


def header_of_spaces(folder: Path) -> None:
    (folder / SINGLE).write_bytes(tensor_file(b"{" + b" " * (limits.HEADER_BYTES - 1)))


def header_longer_than_the_file(folder: Path) -> None:
    (folder / SINGLE).write_bytes(struct.pack("<Q", limits.HEADER_BYTES) + b"{}")


def only_zeros(folder: Path) -> None:
    sparse(folder / SINGLE)


def data_without_tensors(folder: Path) -> None:
    sparse(folder / SINGLE, tensor_file({"a": tensor(0, 4)}))


def tensor_larger_than_the_file(folder: Path) -> None:
    (folder / SINGLE).write_bytes(tensor_file({"a": tensor(0, 2**62)}, b"data"))


def a_million_tensors(folder: Path) -> None:
    entries = (b'"%x":{"dtype":"U8","shape":[],"data_offsets":[0,0]}' % number for number in range(10**6))
    (folder / SINGLE).write_bytes(tensor_file(b"{" + b",".join(entries) + b"}"))


def a_quarter_of_a_million_tensors_below_the_header_limit(folder: Path) -> None:
    entries = (b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number for number in range(250_000))
    (folder / SINGLE).write_bytes(tensor_file(b"{" + b",".join(entries) + b"}"))


def a_million_small_fields(folder: Path) -> None:
    fields = b",".join(b'"%x":0' % number for number in range(1_500_000))
    (folder / SINGLE).write_bytes(tensor_file(b"{" + fields + b"}"))


def a_million_fields_of_metadata(folder: Path) -> None:
    fields = b",".join(b'"%x":""' % number for number in range(1_300_000))
    (folder / SINGLE).write_bytes(tensor_file(b'{"__metadata__":{' + fields + b"}}"))


def shape_of_rank_a_million(folder: Path) -> None:
    (folder / SINGLE).write_bytes(tensor_file({"a": tensor(0, 1, [1] * 10**6)}, b"x"))


def shape_of_zeros_of_rank_two_million(folder: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[' + b"0," * 2_000_000 + b'0],"data_offsets":[0,0]}}'
    (folder / SINGLE).write_bytes(tensor_file(text))


def shape_whose_product_has_a_thousand_digits(folder: Path) -> None:
    (folder / SINGLE).write_bytes(tensor_file({"a": tensor(0, 4, [10**18] * 64)}, b"data"))


def number_of_a_million_digits(folder: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[' + b"9" * 10**6 + b'],"data_offsets":[0,4]}}'
    (folder / SINGLE).write_bytes(tensor_file(text, b"data"))


def exponent_of_a_million_digits(folder: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[1e' + b"9" * 10**6 + b'],"data_offsets":[0,4]}}'
    (folder / SINGLE).write_bytes(tensor_file(text, b"data"))


def a_million_escapes(folder: Path) -> None:
    text = b'{"' + b"\\u0041" * 2_500_000 + b'":0}'
    (folder / SINGLE).write_bytes(tensor_file(text))


def deep_header(folder: Path) -> None:
    (folder / SINGLE).write_bytes(tensor_file(b'{"a":' + b"[" * 10**6))


def deep_index(folder: Path) -> None:
    (folder / INDEX).write_bytes(b'{"weight_map":' * 10**6)


def huge_index(folder: Path) -> None:
    sparse(folder / INDEX, b"{")


def index_of_a_key_for_every_file(folder: Path) -> None:
    (folder / INDEX).write_bytes(index({f"k{number}": f"f{number}.safetensors" for number in range(100_000)}))


def deep_manifest(folder: Path) -> None:
    (folder / "holdfast.json").write_bytes(b"[" * 10**6)


def huge_manifest(folder: Path) -> None:
    sparse(folder / "holdfast.json", b"{")


def record_as_one_block(folder: Path, name: str, size: int) -> None:
    """A manifest that takes a file for good, whatever its size."""
    record = {"size": size, "blocks": [[0, size, digest_hex(b"")]]}
    forge_manifest(folder, lambda fields: fields["files"].update({name: record}))


def recorded_huge_header(folder: Path) -> None:
    size = sparse(folder / MODEL)
    with (folder / MODEL).open("r+b") as file:
        file.write(struct.pack("<Q", size - 8) + b"{")
    record_as_one_block(folder, MODEL, size)


def tensor_file_grown(folder: Path) -> None:
    sparse(folder / MODEL, (folder / MODEL).read_bytes())


def recorded_huge_state(folder: Path) -> None:
    record_as_one_block(folder, "state.json", sparse(folder / "state.json", (folder / "state.json").read_bytes()))


def recorded_block_past_the_end(folder: Path) -> None:
    record_as_one_block(folder, MODEL, 2**62)


def deep_state(folder: Path) -> None:
    forge_file(folder, "state.json", b'{"entries":' * 10**6)


def state_of_lists(folder: Path) -> None:
    text = b'{"version":1,"entries":{"note":{"kind":"json","value":' + b"[" * 700 + b"]" * 700 + b"}}}"
    forge_file(folder, "state.json", text)


def state_with_a_number_of_a_million_digits(folder: Path) -> None:
    forge_file(folder, "state.json", b'{"version":1,"entries":{"note":' + b"9" * 10**6 + b"}}")


def deep_recorded_index(folder: Path) -> None:
    forge_file(folder, INDEX, b"[" * 10**6)


def more_files_than_the_limit(folder: Path) -> None:
    many = {f"f{number}": {"size": 0, "blocks": []} for number in range(limits.MANIFEST_FILES)}
    forge_manifest(folder, lambda fields: fields["files"].update(many))


def _attack(plant: Callable[[Path], None], on: str) -> Attack:
    return Attack(plant.__name__.replace("_", " "), plant, on)


_FOREIGN = (
    huge_header,
    header_just_over_the_limit,
    header_of_zeros,
    header_of_spaces,
    header_longer_than_the_file,
    only_zeros,
    data_without_tensors,
    tensor_larger_than_the_file,
    a_million_tensors,
    a_quarter_of_a_million_tensors_below_the_header_limit,
    a_million_small_fields,
    a_million_fields_of_metadata,
    shape_of_rank_a_million,
    shape_of_zeros_of_rank_two_million,
    shape_whose_product_has_a_thousand_digits,
    number_of_a_million_digits,
    exponent_of_a_million_digits,
    a_million_escapes,
    deep_header,
    deep_index,
    huge_index,
    index_of_a_key_for_every_file,
    deep_manifest,
    huge_manifest,
)
_CHECKPOINT = (
    recorded_huge_header,
    tensor_file_grown,
    recorded_huge_state,
    recorded_block_past_the_end,
    deep_state,
    state_of_lists,
    state_with_a_number_of_a_million_digits,
    deep_recorded_index,
    more_files_than_the_limit,
)
ATTACKS = (*(_attack(plant, "foreign") for plant in _FOREIGN), *(_attack(plant, "checkpoint") for plant in _CHECKPOINT))
