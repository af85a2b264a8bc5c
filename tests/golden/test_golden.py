"""Checkpoints of every released format version open, verify and load; newer ones are refused."""

from __future__ import annotations

import math
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.manifest import CURRENT
from tests.golden.make import (
    ABANDONS,
    FILES,
    METRICS,
    Mode,
    Position,
    Settings,
    golden_state,
    scaled_model,
    tuned_model,
    typed_values,
)

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.glob("v*"))


def test_there_are_golden_checkpoints() -> None:
    assert {"v1.0", "v1.1", "v1.2", "v1.3"} <= set(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_checkpoint_loads_with_its_true_values(version: str) -> None:
    folder = HERE / version
    assert holdfast.open(folder).verify().good
    truth, state = golden_state(), golden_state()
    if version >= "v1.2":
        state["typed"] = typed_values()
    with torch.no_grad():
        for tensor in [*state["model"].state_dict().values(), *state["odd"].values()]:
            tensor.zero_()
    state["optimizer"].state.clear()
    state["note"] = None
    report = holdfast.load(folder, state)
    assert report.step == 42
    for key, value in truth["model"].state_dict().items():
        assert torch.equal(state["model"].state_dict()[key], value), key
    for parameter, other in zip(state["model"].parameters(), truth["model"].parameters(), strict=True):
        for name, value in truth["optimizer"].state[other].items():
            assert torch.equal(state["optimizer"].state[parameter][name], value)
    assert all(torch.equal(state["odd"][key], value) for key, value in truth["odd"].items())
    assert math.isnan(state["note"].pop("nan")) and state["note"] == {"tuple": (1, b"x"), "keys": {1: "one"}}


def test_the_bytes_are_still_the_golden_ones(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "now", golden_state(), step=42)
    golden = HERE / "v1.0"
    for path in golden.iterdir():
        if "safetensors" in path.name:
            assert (tmp_path / "now" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_says_the_version_of_its_folder(version: str) -> None:
    fields = strictjson.loads((HERE / version / "holdfast.json").read_bytes(), "manifest")
    assert version == f"v{fields['version'][0]}.{fields['version'][1]}"


def test_the_newest_golden_checkpoint_is_of_the_current_version() -> None:
    assert "v{}.{}".format(*CURRENT) in VERSIONS


def test_what_version_1_1_added_is_read_and_was_not_in_1_0() -> None:
    new, old = holdfast.open(HERE / "v1.1").manifest, holdfast.open(HERE / "v1.0").manifest
    assert (dict(new.metrics), new.abandons) == (METRICS, ABANDONS)
    assert (dict(old.metrics), old.abandons) == ({}, ())


def test_the_adapter_of_version_1_2_is_read() -> None:
    pytest.importorskip("peft", reason="peft is not installed: make setup")
    folder = HERE / "v1.2"
    assert {name: group.kind for name, group in holdfast.open(folder).manifest.groups.items() if "tuned" in name} == {
        "tuned": "adapter",
        "tuned.base": "base",
    }
    assert (folder / "tuned" / "adapter_model.safetensors").exists()
    truth, live = tuned_model(), tuned_model()
    with torch.no_grad():
        for tensor in live.state_dict(keep_vars=True).values():
            tensor.zero_()
    holdfast.load(folder, {"tuned": live})
    assert all(torch.equal(live.state_dict()[key], value) for key, value in truth.state_dict().items())


def test_what_version_1_2_added_is_read() -> None:
    truth, live = typed_values(), typed_values()
    live |= {"settings": Settings(), "position": Position(0, 0), "window": deque(maxlen=4), "dtype": None}
    live["counts"].clear()
    state = {"typed": live}
    holdfast.load(HERE / "v1.2", state, only=["typed"])
    scale, wanted = state["typed"]["settings"].scale, truth["settings"].scale
    assert torch.equal(scale, wanted)
    assert state["typed"]["settings"].mode is Mode.TEST
    for name in truth.keys() - {"settings"}:
        assert state["typed"][name] == truth[name] and type(state["typed"][name]) is type(truth[name]), name
    checkpoint = holdfast.open(HERE / "v1.2")
    assert {name for name, record in checkpoint.manifest.files.items() if record.kind == "extra"} == FILES.keys()
    assert checkpoint.read_file("tokenizer.json") == FILES["tokenizer.json"]


def test_the_program_of_version_1_3_is_read_and_runs() -> None:
    assert holdfast.open(HERE / "v1.2").program is None
    program = holdfast.open(HERE / "v1.3").program
    assert program is not None and program.group == "scaled" and program.symbols == {"rows": (0, None)}
    module, x = holdfast.load_program(HERE / "v1.3"), torch.arange(15.0).reshape(5, 3) / 8
    assert torch.equal(module(x), scaled_model()(x))


def test_a_reader_of_1_2_finds_nothing_unknown_in_a_checkpoint_with_a_program() -> None:
    """The promise of minor versions: unknown kinds are refused, so a program has none."""
    fields = strictjson.loads((HERE / "v1.3" / "holdfast.json").read_bytes(), "manifest")
    assert {record["kind"] for record in fields["files"].values() if "kind" in record} == {"extra"}
    kinds_of_1_2 = {"module", "optimizer", "masters", "tensors", "stateful", "adapter", "base", "buffers"}
    assert {group["kind"] for group in fields["groups"].values()} <= kinds_of_1_2


def altered(golden: Path, folder: Path, **changes: object) -> Path:
    """A golden checkpoint with fields of its manifest changed and signed again."""
    shutil.copytree(golden, folder)
    manifest = folder / "holdfast.json"
    fields = strictjson.loads(manifest.read_bytes(), "manifest")
    del fields["digest"]
    fields.update(changes)
    fields["digest"] = digest_hex(strictjson.dumps(fields))
    manifest.write_bytes(strictjson.dumps(fields) + b"\n")
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_a_newer_major_version_is_refused_with_the_way_out(version: str, tmp_path: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match=r"format version 2\.0.*install a newer version"):
        holdfast.open(altered(HERE / version, tmp_path / "future", version=[2, 0]))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_newer_minor_version_with_fields_nobody_knows_is_read(version: str, tmp_path: Path) -> None:
    folder = altered(HERE / version, tmp_path / "newer", version=[1, 99], surprise={"more": [1, 2]})
    assert holdfast.open(folder).verify().good
    state = golden_state() | ({"typed": typed_values()} if version >= "v1.2" else {})
    assert holdfast.load(folder, state).step == 42


def with_state(golden: Path, folder: Path, entries: dict[str, Any], **changes: Any) -> Path:
    """A golden checkpoint with entries added to its state.json, signed again."""
    shutil.copytree(golden, folder)
    path = folder / "state.json"
    fields = strictjson.loads(path.read_bytes(), "state")
    fields["entries"] |= entries
    path.write_bytes(strictjson.dumps(fields))
    manifest = folder / "holdfast.json"
    files = strictjson.loads(manifest.read_bytes(), "manifest")["files"]
    size = path.stat().st_size
    files["state.json"] |= {"size": size, "blocks": [[0, size, digest_hex(path.read_bytes())]]}
    moved = folder.rename(folder.with_name("signed"))
    made = altered(moved, folder, files=files, **changes)
    shutil.rmtree(moved)
    return made


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unknown_value_of_a_newer_minor_version_is_unsupported_and_names_the_version(
    version: str, tmp_path: Path
) -> None:
    entries = {"later": {"kind": "json", "value": {"a": [{"$later": 1}]}}}
    newer = with_state(HERE / version, tmp_path / "newer", entries, version=[1, 99])
    for use in (lambda: holdfast.load(newer, golden_state()), lambda: holdfast.open(newer).verify()):
        with pytest.raises(holdfast.Unsupported, match=r"'later' .*'\$later'.*version 1\.99.*knows 1\.3"):
            use()
    other = with_state(HERE / version, tmp_path / "other", {"later": {"kind": "later", "value": 1}}, version=[1, 99])
    with pytest.raises(holdfast.Unsupported, match=r"'later' is of the unknown kind 'later'.*version 1\.99"):
        holdfast.load(other, {"later": None}, only=["later"])
    same = with_state(HERE / version, tmp_path / "same", entries, version=list(CURRENT))
    with pytest.raises(holdfast.Unsupported, match=r"^later: unknown tag '\$later'$"):
        holdfast.load(same, {"later": None}, only=["later"])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_an_unknown_kind_is_unsupported_in_a_newer_minor_version_and_damage_in_this_one(
    version: str, tmp_path: Path
) -> None:
    files = strictjson.loads((HERE / version / "holdfast.json").read_bytes(), "manifest")["files"]
    files["state.json"]["kind"] = "program"
    with pytest.raises(holdfast.Unsupported, match=r"unknown kind 'program'.*version 1\.99"):
        holdfast.open(altered(HERE / version, tmp_path / "newer", version=[1, 99], files=files))
    with pytest.raises(holdfast.Damaged, match="unknown kind 'program'"):
        holdfast.open(altered(HERE / version, tmp_path / "same", version=list(CURRENT), files=files))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_group_of_an_unknown_kind_is_unsupported_in_a_newer_minor_version_and_damage_in_this_one(
    version: str, tmp_path: Path
) -> None:
    groups = strictjson.loads((HERE / version / "holdfast.json").read_bytes(), "manifest")["groups"]
    groups["odd"]["kind"] = "sparse"
    with pytest.raises(holdfast.Unsupported, match=r"odd is a group of the unknown kind 'sparse'.*version 1\.99"):
        holdfast.open(altered(HERE / version, tmp_path / "newer", version=[1, 99], groups=groups))
    with pytest.raises(holdfast.Damaged, match="odd is a group of the unknown kind 'sparse'"):
        holdfast.open(altered(HERE / version, tmp_path / "same", version=list(CURRENT), groups=groups))


def test_an_unknown_dtype_of_a_newer_minor_version_is_unsupported_and_names_the_version(tmp_path: Path) -> None:
    groups = strictjson.loads((HERE / "v1.2" / "holdfast.json").read_bytes(), "manifest")["groups"]
    groups["model"]["logical_dtypes"] = {next(iter(holdfast.open(HERE / "v1.2").keys("model"))): "posit16"}
    with pytest.raises(holdfast.Unsupported, match=r"unknown dtype 'posit16'.*version 1\.99"):
        holdfast.open(altered(HERE / "v1.2", tmp_path / "logical", version=[1, 99], groups=groups))
    for version, error in (([1, 99], holdfast.Unsupported), (list(CURRENT), holdfast.Damaged)):
        folder = with_header_dtype(HERE / "v1.2", tmp_path / str(version[1]), b"P64", version)
        with pytest.raises(error, match=r"the unknown dtype 'P64'"):
            holdfast.open(folder).keys()


def with_header_dtype(golden: Path, folder: Path, code: bytes, version: list[int]) -> Path:
    """A golden checkpoint whose model has another dtype in place of I64, signed again."""
    shutil.copytree(golden, folder)
    fields = strictjson.loads((folder / "holdfast.json").read_bytes(), "manifest")
    (name,) = fields["groups"]["model"]["files"]
    data = (folder / name).read_bytes().replace(b'"dtype":"I64"', b'"dtype":"%s"' % code, 1)
    (folder / name).write_bytes(data)
    size = 8 + int.from_bytes(data[:8], "little")
    blocks = [[0, len(data), digest_hex(data)]]
    fields["files"][name] |= {"header": [size, digest_hex(data[:size])], "blocks": blocks}
    return altered(folder, folder.with_name(f"{folder.name}-signed"), files=fields["files"], version=version)


def test_a_recorded_mapping_that_a_newer_minor_version_wrote_is_unsupported_and_names_the_version(
    tmp_path: Path,
) -> None:
    text = {"model": "a.weight ~~> b.weight"}
    newer = altered(HERE / "v1.2", tmp_path / "newer", version=[1, 99], mappings=text)
    with pytest.raises(holdfast.Unsupported, match=r"(?s)the mapping of model.*version 1\.99"):
        holdfast.load(newer, {"model": torch.nn.Linear(3, 2)}, strict=False)


def test_a_root_with_steps_of_all_versions_restores_rotates_and_verifies(tmp_path: Path) -> None:
    for step, version in enumerate(VERSIONS, 40):
        altered(HERE / version, tmp_path / f"step-{step:012d}", step=step, abandons=[])
    live = golden_state() | {"typed": typed_values()}
    with holdfast.Checkpointer(tmp_path, keep=holdfast.keep.last(2)) as ck:
        assert ck.steps() == [40, 41, 42, 43]
        assert ck.restore(live, step=40, only=["model"]) == 40
        assert ck.restore(live) == 43
        ck.save(44, live).result()
        assert ck.steps() == [43, 44]
    for step in (43, 44):
        assert holdfast.open(tmp_path / f"step-{step:012d}").verify().good


def test_a_root_with_a_step_that_a_newer_version_wrote_says_so_and_keeps_it(tmp_path: Path) -> None:
    altered(HERE / "v1.1", tmp_path / "step-000000000040", step=40, abandons=[])
    files = strictjson.loads((HERE / "v1.2" / "holdfast.json").read_bytes(), "manifest")["files"]
    files["state.json"]["kind"] = "program"
    altered(HERE / "v1.2", tmp_path / "step-000000000041", step=41, abandons=[], version=[1, 99], files=files)
    with holdfast.Checkpointer(tmp_path, keep=holdfast.keep.last(1)) as ck:
        with pytest.raises(holdfast.Unsupported, match=r"format version 1\.99.*move step-000000000041 away"):
            ck.restore(golden_state())
        with pytest.raises(holdfast.StorageError, match=r"step 41 cannot be read now, so that going back to 40"):
            ck.restore(golden_state(), step=40)
    assert (tmp_path / "step-000000000041").is_dir()
