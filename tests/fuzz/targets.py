"""What is fuzzed: every parser of bytes that somebody else may have written, with good inputs to begin from."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport, small_file_record
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.retention import saved_policy
from holdfast.checkpoint.tags import read_tags
from holdfast.core.errors import NotFound
from holdfast.format import statejson, strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.dtypes import dtype_named
from holdfast.format.manifest import BlockRecord, FileRecord, GroupRecord, Manifest, decode_manifest, encode_manifest
from holdfast.format.safetensors import (
    LENGTH_BYTES,
    TensorEntry,
    decode_header,
    decode_index,
    encode_header,
    encode_index,
    header_bytes,
)
from holdfast.plan.writer_job import BlockJob, Copy, TravelJob, WriterJob
from holdfast.program.model_program import Program
from holdfast.writer.arena_card import Card, card_path
from holdfast.writer.in_flight import saves_in_flight
from tests.fuzz.foreign import foreign_targets
from tests.fuzz.mappings import mapping_seeds, parse_mapping, seal_mapping, unseal_mapping
from tests.fuzz.paddle_targets import paddle_targets
from tests.fuzz.target import Target
from tests.program.by_hand import program

_TAIL = b"\x00" * 22


class OneFolder:
    """A storage of one folder that holds what it is given."""

    name = "fuzz"
    poll_s = 0.02

    def __init__(self, files: dict[str, bytes], hidden: tuple[str, ...] = ()) -> None:
        self._files = files
        self._hidden = hidden

    def pin(self, folder: str) -> OneFolder:
        return self

    def hidden(self) -> list[str]:
        return list(self._hidden)

    def files(self, folder: str = "") -> dict[str, int]:
        return {name: len(data) for name, data in self._files.items()}

    def read(self, *names: Any) -> bytes:
        *_, name, _limit = names
        if name not in self._files:
            raise NotFound(f"no {name}")
        return self._files[name]


def _header_seeds() -> tuple[bytes, ...]:
    f32, bf16, u8 = dtype_named("float32"), dtype_named("bfloat16"), dtype_named("uint8")
    entries = [TensorEntry("layers.0.w", f32, (2, 2), 0, 16), TensorEntry("é", bf16, (3,), 16, 22)]
    empty = [TensorEntry("none", u8, (0, 4), 0, 0), TensorEntry("all", u8, (22,), 0, 22)]
    return encode_header(entries) + _TAIL, encode_header(empty) + _TAIL


def _parse_header(data: bytes) -> object:
    size = header_bytes(data[:LENGTH_BYTES], len(data), "fuzz")
    return decode_header(data[:size], len(data), "fuzz")


def _seal_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + _TAIL


def _manifest() -> Manifest:
    digest = digest_hex(b"")
    blocks = (BlockRecord(0, 4096, digest), BlockRecord(4096, 10, digest))
    files = {
        "model-00001-of-00001.safetensors": FileRecord(4106, blocks, BlockRecord(0, 64, digest)),
        "ema/model-00001-of-00001.safetensors": FileRecord(0, ()),
        "state.json": small_file_record(b"{}", 4096),
    }
    model = GroupRecord("module", ("model-00001-of-00001.safetensors",), 10, {"tied": "w"}, {"z": "complex128"})
    groups = {"model": model, "ema/model": GroupRecord("module", ("ema/model-00001-of-00001.safetensors",), 0)}
    writer = {"holdfast": "0", "world": 2, "hosts": 1, "mesh": {"dp": 2}, "first_replica": ["model: w"]}
    metrics = {"loss": 1.5, "none": None}
    made = "2026-01-01T00:00:00+00:00"
    return Manifest(7, 5, ".attempt-0", made, 4096, groups, files, writer, metrics, ((6, ".attempt-1"),))


def _unseal_manifest(data: bytes) -> bytes:
    fields = json.loads(data)
    fields.pop("digest", None)
    return strictjson.dumps(fields)


def _seal_manifest(text: bytes) -> bytes:
    """Sign it again, so that what is behind the digest is reached."""
    return text[:-1] + b',"digest":"' + digest_hex(text).encode() + b'"}\n'


def _state_seed() -> bytes:
    value = {"nan": float("nan"), "tuple": (1, b"x", 2.5), "keys": {1: "one"}, "set": {1, 2}, "c": 1j}
    value["np"], value["big"] = np.float32(1.5), 2**100
    entries = {
        "note": {"kind": "json", "value": statejson.encode(value, "note")},
        "rng": {"kind": "json", "axes": ["dp"], "sizes": [2], "values": {"0": [1], "1": [{"$tensor": "rng/0"}]}},
        "optimizer": {"kind": "optimizer", "groups": [{"params": ["w"], "options": {"lr": 0.1}}]},
    }
    return strictjson.dumps({"version": 1, "entries": entries}) + b"\n"


def _parse_state(data: bytes) -> object:
    manifest = Manifest(1, None, "a", "c", 4096, {}, {"state.json": small_file_record(data, 4096)}, {})
    folder: Any = OneFolder({"holdfast.json": encode_manifest(manifest), "state.json": data})
    checkpoint = Checkpoint(folder, "")
    return [checkpoint.value(name) for name, entry in checkpoint.state.items() if "value" in entry]


def _card_path() -> str:
    return str(Path(tempfile.gettempdir()) / f"holdfast-fuzz-{os.getpid()}")


def _card_seed() -> bytes:
    lineage = Lineage(3, None, {"loss": 1.5}, ((6, ".attempt-1"),))
    strided, flat = Copy(0, 0, 0, 4, (2, 2), (8, 4), (16, 4)), Copy(1, 0, 0, 1, (4,), (1,), (1,))
    block = BlockJob("f", 0, 4, b"head", (strided,), (flat,))
    job = WriterJob("p", 0, 1, 0, 1, {0: 4096}, (block,), (TravelJob(1, 4, (flat,)),))
    report = BlockReport("f", 0, 4, "0" * 32)
    card = Card(".attempt-0", lineage, 0, "ARENA", job, None, (report,), {}, "", "here")
    return strictjson.dumps(card.fields())


def _parse_card(data: bytes) -> object:
    arena = _card_path()
    path = Path(card_path(arena))
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.replace(b"ARENA", arena.encode()))
        card = Card.read(path)
        return sorted([card.rank, 0]), {card.job.plan, card.attempt, card.host}
    finally:
        path.unlink()


def _parse_tag(data: bytes) -> object:
    folder: Any = OneFolder({"best": data}, (".tags",))
    return read_tags(folder)


def _parse_policy(data: bytes) -> object:
    folder: Any = OneFolder({"keep.json": data}, (".policy",))
    return saved_policy(folder)


def _parse_note(data: bytes) -> object:
    folder: Any = OneFolder({"begun": data, "status-0": data}, (".mail-0",))
    return saves_in_flight(folder)


_INDEX = encode_index({"a": "model-00001-of-00002.safetensors", "é": "model-00002-of-00002.safetensors"}, 10)
_NOTE = strictjson.dumps({"step": 3, "world": 2, "bytes": 10, "written": 4, "total": 9, "phase": "writing"})

TARGETS = {
    target.name: target
    for target in (
        Target("header", _header_seeds(), _parse_header, lambda data: data[8 : -len(_TAIL)], _seal_header),
        Target("index", (_INDEX, b'{"weight_map":{}}'), lambda data: decode_index(data, "fuzz", "ema/")),
        Target(
            "manifest",
            (encode_manifest(_manifest()),),
            lambda data: decode_manifest(data, "fuzz"),
            _unseal_manifest,
            _seal_manifest,
        ),
        Target("state", (_state_seed(),), _parse_state),
        Target("card", (_card_seed(),), _parse_card),
        Target("tag", (b'{"step":3,"attempt":".attempt-0"}',), _parse_tag),
        Target("policy", (b'[["last",[3]],["best",[2,"loss","min"]],["newer_than",[60.0]]]',), _parse_policy),
        Target("note", (_NOTE,), _parse_note),
        Target("program", (program().to_json(),), Program.from_json),
        Target("mapping", mapping_seeds(), parse_mapping, unseal_mapping, seal_mapping),
        *paddle_targets(),
        *(Target(*fields) for fields in foreign_targets()),
    )
}
