"""The manifest: read back as written, refused where it is damaged, upgraded where it is old."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.format import manifest, strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.manifest import BlockRecord, FileRecord, GroupRecord, Manifest, decode_manifest, encode_manifest

FILE = "model-00001-of-00001.safetensors"
SMALL = Manifest(
    step=7,
    parent=None,
    attempt=".attempt-0123456789abcdef",
    created="2026-01-02T03:04:05+00:00",
    block_bytes=4096,
    groups={"model": GroupRecord("module", (FILE,), 5000, {"head": "embed"}, {"phase": "complex128"})},
    files={
        FILE: FileRecord(
            5100, (BlockRecord(0, 4096, "a" * 32), BlockRecord(4096, 1004, "b" * 32)), BlockRecord(0, 100, "c" * 32)
        ),
        "state.json": FileRecord(2, (BlockRecord(0, 2, "d" * 32),)),
        "empty.txt": FileRecord(0, ()),
    },
    writer={"holdfast": "0.1.0", "world": 8, "mesh": {"dp": 8}},
)


def resigned(change):
    """The small manifest with its fields changed and a digest that fits, as an attacker would write it."""
    fields = json.loads(encode_manifest(SMALL))
    del fields["digest"]
    change(fields)
    fields["digest"] = digest_hex(strictjson.dumps(fields))
    return strictjson.dumps(fields) + b"\n"


PLANS = {"model": {"version": 1, "mesh": [["tp", 2]]}}


def test_a_manifest_keeps_the_plans_of_its_modules_and_lacks_the_field_without():
    kept = replace(SMALL, plans=PLANS)
    assert decode_manifest(encode_manifest(kept), "run/step").plans == PLANS
    assert b'"plans"' not in encode_manifest(SMALL)


@pytest.mark.parametrize("plans", [[], {"model": 3}, {"../model": {}}])
def test_plans_that_are_none_are_damage(plans):
    with pytest.raises(HoldfastError):
        decode_manifest(resigned(lambda fields: fields.update(plans=plans)), "run/step")


def test_a_manifest_round_trips():
    assert decode_manifest(encode_manifest(SMALL), "run/step") == SMALL


DIGESTS = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def file_records(draw):
    sizes = draw(st.lists(st.integers(1, 2**40), max_size=4))
    blocks = tuple(BlockRecord(sum(sizes[:i]), size, draw(DIGESTS)) for i, size in enumerate(sizes))
    header = BlockRecord(0, draw(st.integers(1, sum(sizes))), draw(DIGESTS)) if sizes and draw(st.booleans()) else None
    return FileRecord(sum(sizes), blocks, header)


@st.composite
def manifests(draw):
    names = draw(st.lists(st.from_regex(r"[a-z][a-z0-9.]{0,8}", fullmatch=True), unique=True, max_size=4))
    files = {name: draw(file_records()) for name in names}
    texts = st.text("ab.é", min_size=1, max_size=4)
    groups = {}
    for group in draw(st.lists(st.sampled_from(["model", "optimizer", "ema/model", "rng"]), unique=True)):
        members = tuple(name for name in names if draw(st.booleans())) or tuple(names[:1])
        if not members:
            continue
        tied = draw(st.dictionaries(texts, texts, max_size=2))
        groups[group] = GroupRecord("module", members, draw(st.integers(0, 2**60)), tied, {})
    steps = st.none() | st.integers(0, 2**62)
    return Manifest(
        draw(steps),
        draw(steps),
        "a",
        "now",
        4096,
        groups,
        files,
        draw(st.dictionaries(texts, texts)),
        saved_by=draw(texts),
    )


@given(manifests())
def test_any_manifest_round_trips_to_the_same_bytes(manifest):
    data = encode_manifest(manifest)
    assert decode_manifest(data, "w") == manifest
    assert encode_manifest(decode_manifest(data, "w")) == data


def test_the_total_is_the_sum_of_the_files():
    assert SMALL.total_bytes == 5102


def test_content_leaves_out_who_wrote_it_and_when():
    again = replace(SMALL, attempt="other", created="later", writer={}, parent=3)
    assert again.content() == SMALL.content()
    assert replace(SMALL, step=8).content() != SMALL.content()


def test_every_single_bit_flip_is_refused():
    data = encode_manifest(SMALL)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Damaged, Unsupported)):
            decode_manifest(bytes(flipped), "w")


def test_every_truncation_is_refused():
    data = encode_manifest(SMALL)
    for size in range(len(data)):
        with pytest.raises(Damaged):
            decode_manifest(data[:size], "w")


@given(st.data())
def test_bytes_changed_at_random_are_refused(draw):
    data = encode_manifest(SMALL)
    at = draw.draw(st.integers(0, len(data) - 1))
    new = draw.draw(st.binary(max_size=5))
    changed = data[:at] + new + data[at + draw.draw(st.integers(0, 5)) :]
    if changed != data:
        with pytest.raises((Damaged, Unsupported)):
            decode_manifest(changed, "w")


@pytest.mark.parametrize(
    "changed", [lambda d: b" " + d, lambda d: d[:-1], lambda d: d + b"\n", lambda d: d.replace(b",", b", ")]
)
def test_the_same_fields_written_another_way_are_refused(changed):
    with pytest.raises(Damaged, match="not in the form that Holdfast writes"):
        decode_manifest(changed(encode_manifest(SMALL)), "w")


def test_a_wrong_digest_is_named_with_the_one_expected():
    data = encode_manifest(SMALL).replace(b'"step":7', b'"step":8')
    with pytest.raises(
        Damaged, match=r"^run/step-7/holdfast\.json: the digest of the manifest is [0-9a-f]{32}, but it states "
    ):
        decode_manifest(data, "run/step-7")


def test_a_newer_major_version_is_refused_and_says_what_to_do():
    with pytest.raises(Unsupported, match=r"written in format version 2\.0, .* install a newer version"):
        decode_manifest(resigned(lambda fields: fields.update(version=[2, 0])), "w")


def test_a_newer_major_version_may_have_fields_we_do_not_know():
    def change(fields):
        fields.clear()
        fields.update(format="holdfast", version=[9, 1], everything="is different")

    with pytest.raises(Unsupported, match=r"format version 9\.1"):
        decode_manifest(resigned(change), "w")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b'{"format":"other"}', b"[" * 100_000, b"\xff", b"PK\x03\x04"]
)
def test_what_is_not_a_manifest_is_damage(data):
    with pytest.raises(Damaged):
        decode_manifest(data, "w")


FIELDS = ["version", "step", "parent", "attempt", "created", "writer", "block_bytes", "groups", "files"]


@pytest.mark.parametrize("name", [*FIELDS, "format"])
def test_a_missing_field_is_damage(name):
    with pytest.raises(Damaged):
        decode_manifest(resigned(lambda fields: fields.pop(name)), "w")


def test_a_missing_digest_is_damage():
    fields = json.loads(encode_manifest(SMALL))
    del fields["digest"]
    with pytest.raises(Damaged, match="it states None"):
        decode_manifest(strictjson.dumps(fields) + b"\n", "w")


@pytest.mark.parametrize("value", [-1, 1.0, True, "7", [], {}, 2**63])
@pytest.mark.parametrize("name", ["step", "parent", "block_bytes"])
def test_a_number_that_is_no_size_is_damage(name, value):
    with pytest.raises(Damaged, match=name):
        decode_manifest(resigned(lambda fields: fields.update({name: value})), "w")


@pytest.mark.parametrize("value", [None, 1, "x", [], [1]])
@pytest.mark.parametrize("name", ["groups", "files"])
def test_a_table_that_is_no_table_is_damage(name, value):
    with pytest.raises(Damaged):
        decode_manifest(resigned(lambda fields: fields.update({name: value})), "w")


def state_file(**changes):
    return lambda fields: fields["files"]["state.json"].update(changes)


D = "d" * 32


@pytest.mark.parametrize(
    "change",
    [
        state_file(size=3),
        state_file(size=-2),
        state_file(size=2.0),
        state_file(size=None),
        state_file(blocks=[]),
        state_file(blocks=None),
        state_file(blocks=7),
        state_file(blocks=[[1, 2, D]]),
        state_file(blocks=[[0, 1, D]]),
        state_file(blocks=[[0, 1, D], [0, 1, D]]),
        state_file(blocks=[[0, 3, D], [3, -1, D]]),
        state_file(blocks=[[0, 2, D], [2, 0, D]]),
        state_file(blocks=[[0, 2.0, D]]),
        state_file(blocks=[[0, True, D], [1, 1, D]]),
        state_file(blocks=[[0, 2]]),
        state_file(blocks=[[0, 2, D, 1]]),
        state_file(blocks=[[0, 2, D[1:]]]),
        state_file(blocks=[[0, 2, None]]),
        state_file(blocks=[[0, 2, 5]]),
        state_file(blocks=["abc"]),
        state_file(blocks={"0": [0, 2, D]}),
        state_file(blocks=[[0, 2**64, D]], size=2**64),
        state_file(header=[0, D]),
        state_file(header=[3, D]),
        state_file(header=[-1, D]),
        state_file(header=[1.0, D]),
        state_file(header=[1, "d"]),
        state_file(header=None),
        state_file(header=[]),
        lambda fields: fields["files"].update({"x": None}),
        lambda fields: fields["files"].update({"x": {}}),
        lambda fields: fields["files"].update({"x": {"size": 0}}),
    ],
)
def test_a_file_whose_blocks_do_not_cover_it_is_damage(change):
    with pytest.raises(Damaged):
        decode_manifest(resigned(change), "w")


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "/etc/passwd", "a\0", "a\nb", "a\\b", "%2e%2e", "n" * 300, ".x", "a/b/c", "C:x", "a/"]
)
def test_a_hostile_file_name_is_damage(name):
    def change(fields):
        fields["files"][name] = {"size": 0, "blocks": []}

    with pytest.raises(Damaged, match="is not an allowed file name"):
        decode_manifest(resigned(change), "w")


@pytest.mark.parametrize("name", ["", "..", "../x", "con", "LPT1", "a\0", "a b", "a\x1b", "n" * 300, "a/b/c"])
def test_a_hostile_group_name_is_refused(name):
    def change(fields):
        fields["groups"][name] = fields["groups"]["model"]

    with pytest.raises(HoldfastError, match="cannot name a group"):
        decode_manifest(resigned(change), "w")


@pytest.mark.parametrize(
    "changes",
    [
        {"files": ["model-00002-of-00002.safetensors"]},
        {"files": ["../x"]},
        {"files": [None]},
        {"files": [[FILE]]},
        {"files": None},
        {"files": FILE},
        {"total_bytes": -1},
        {"total_bytes": "5"},
        {"total_bytes": 1.5},
        {"aliases": None},
        {"aliases": 5},
        {"logical_dtypes": ["phase"]},
    ],
)
def test_an_odd_group_is_damage(changes):
    with pytest.raises(Damaged):
        decode_manifest(resigned(lambda fields: fields["groups"]["model"].update(changes)), "w")


def test_more_files_than_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr(limits, "MANIFEST_FILES", 2)
    with pytest.raises(Damaged, match="3 files, more than the limit of 2"):
        decode_manifest(encode_manifest(SMALL), "w")


def test_more_blocks_than_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr(limits, "BLOCKS_PER_FILE", 1)
    with pytest.raises(Damaged, match="more than 1 blocks"):
        decode_manifest(encode_manifest(SMALL), "w")


def test_the_current_version_passes_unchanged():
    fields = {"version": list(manifest.CURRENT), "step": 3}
    assert manifest.upgrade(fields, "w") == fields


def test_a_newer_minor_version_is_read():
    fields = {"version": [manifest.CURRENT[0], manifest.CURRENT[1] + 5]}
    assert manifest.upgrade(fields, "w") is fields


def test_an_upgrade_refuses_a_newer_major_version():
    with pytest.raises(Unsupported, match=r"^run: written in format version 9\.3, .* install a newer version$"):
        manifest.upgrade({"version": [9, 3]}, "run")


@pytest.mark.parametrize(
    "version", [None, 1, "1.0", [], [1], [1, 0, 0], [1.0, 0], [True, 0], ["1", "0"], [-1, 0], [1, -1], {"major": 1}]
)
def test_a_version_that_is_not_two_numbers_is_damage(version):
    with pytest.raises(Damaged, match="is not two numbers"):
        manifest.upgrade({"version": version}, "run")


def test_a_missing_version_is_damage():
    with pytest.raises(Damaged, match="is not two numbers"):
        manifest.upgrade({}, "run")


def test_a_version_that_never_was_is_damage():
    with pytest.raises(Damaged, match="format version 0 never existed"):
        manifest.upgrade({"version": [0, 9]}, "run")


def test_older_versions_are_lifted_one_step_at_a_time(monkeypatch):
    monkeypatch.setattr(manifest, "CURRENT", (3, 0))
    monkeypatch.setitem(manifest.PATCHES, 1, lambda fields: fields | {"lifted": ["1 to 2"]})
    monkeypatch.setitem(manifest.PATCHES, 2, lambda fields: fields | {"lifted": fields["lifted"] + ["2 to 3"]})
    assert manifest.upgrade({"version": [1, 0]}, "w")["lifted"] == ["1 to 2", "2 to 3"]
