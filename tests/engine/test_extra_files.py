"""Files that a user publishes with a step: what is taken, what is refused, and that they are as safe as the rest."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import holdfast
from holdfast.cli.main import cli
from holdfast.engine.extra_files import ExtraFileEncoder, read_files
from tests.dist.harness import run_ranks

FILES: dict[str, Any] = {
    "tokenizer.json": b'{"a": 1}',
    "vocab.txt": "é\n",
    "templates/chat.jinja": b"\x00\xff",
    "README.md": "",
}


def state() -> dict[str, Any]:
    return {"model": torch.nn.Linear(2, 2), "step": 1}


def published(folder: Path) -> dict[str, bytes]:
    checkpoint = holdfast.open(folder)
    names = [name for name, record in checkpoint.manifest.files.items() if record.kind == "extra"]
    assert all((folder / name).read_bytes() == checkpoint.read_file(name) for name in names)
    return {name: (folder / name).read_bytes() for name in names}


EXPECTED = {
    "tokenizer.json": b'{"a": 1}',
    "vocab.txt": b"\xc3\xa9\n",
    "templates/chat.jinja": b"\x00\xff",
    "README.md": b"",
}


@pytest.mark.parametrize("blocking", [True, False])
def test_files_are_published_verified_and_in_show(tmp_path: Path, blocking: bool) -> None:
    if blocking:
        folder = tmp_path / "step-000000000001"
        holdfast.save(folder, state(), files=FILES)
    else:
        with holdfast.Checkpointer(tmp_path) as checkpointer:
            folder = Path(checkpointer.save(1, state(), files=FILES).result().path)
    assert published(folder) == EXPECTED
    assert holdfast.open(folder).verify().good
    shown = CliRunner().invoke(cli, ["show", str(folder)])
    assert "vocab.txt (3 B)" in shown.output
    fields = json.loads(CliRunner().invoke(cli, ["show", str(folder), "--json"]).output)
    assert fields["extra_files"] == {name: len(data) for name, data in EXPECTED.items()}
    live = state()
    holdfast.load(folder, live)  # files are no part of a state
    (folder / "vocab.txt").write_bytes(b"e\n\n")
    assert [damage.file for damage in holdfast.open(folder).verify().damage] == ["vocab.txt"]


def test_a_function_fills_a_folder_and_paths_are_read(tmp_path: Path) -> None:
    def fill(folder: str) -> None:
        Path(folder, "sub").mkdir()
        Path(folder, "sub", "a.txt").write_bytes(b"a")
        Path(folder, "b.txt").write_bytes(b"b")

    assert read_files(fill) == {"sub/a.txt": b"a", "b.txt": b"b"}
    source = tmp_path / "anything.bin"
    source.write_bytes(b"c")
    assert read_files({"c.txt": source, "d.txt": bytearray(b"d")}) == {"c.txt": b"c", "d.txt": b"d"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("holdfast.json", "writes itself"),
        ("State.json", "writes itself"),
        ("config.json", "writes itself"),
        ("model.safetensors", "save tensors in the state"),
        ("sub/model.safetensors.index.json", "save tensors in the state"),
        ("sub/holdfast.json", "writes itself"),
        ("training_args.bin", "name of a pickle"),
        ("rng_state.PTH", "name of a pickle"),
        ("../escape.txt", "not an allowed file name"),
        ("a/../b.txt", "not an allowed file name"),
        ("/etc/passwd", "not an allowed file name"),
        ("a/b/c.txt", "not an allowed file name"),
        ("a\\b.txt", "not an allowed file name"),
        (".hidden", "not an allowed file name"),
        ("aux.txt", "not an allowed file name"),
        ("", "not an allowed file name"),
        (7, "is not a text"),
    ],
)
def test_names_that_are_refused(name: Any, reason: str) -> None:
    with pytest.raises(holdfast.InvalidArgument, match=f"{re.escape(repr(name))} .*{reason}"):
        read_files({name: b""})


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"args.dat": pickle.dumps({"a": 1})}, "'args.dat' is a pickle"),
        ({"a.txt": b"", "A.txt": b""}, "differ only by case"),
        ({"a": b"", "A/b": b""}, "is in a folder with the name of another file"),
        ({f"{number}.txt": b"" for number in range(1001)}, "1001 files, more than 1000"),
        ({"a.txt": __file__}, "give pathlib.Path"),
        ({"a.txt": "\ud800"}, "no valid text"),
        (lambda folder: 1 / 0, "the function raised ZeroDivisionError"),
        ({"a.txt": 3}, "is of type int"),
        ({"a.txt": Path("no such file")}, "cannot be read"),
        ({"a.txt": bytes(65 * 2**20)}, "more than 64 MiB"),
        ([("a.txt", b"")], "such as tokenizer.save_pretrained"),
    ],
)
def test_contents_that_are_refused(files: Any, reason: str) -> None:
    with pytest.raises(holdfast.InvalidArgument, match=reason):
        read_files(files)


def test_a_torch_file_under_another_name_is_a_pickle(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "saved")
    with pytest.raises(holdfast.InvalidArgument, match="is a pickle"):
        read_files({"notes.txt": tmp_path / "saved"})


def save_with_a_clash(root: str, name: str) -> None:
    live = state()
    live["ema"] = holdfast.EMA(live["model"], decay=0.5)
    with pytest.raises(holdfast.InvalidArgument, match=f"{name}.*name of an entry of the state"):
        holdfast.save(f"{root}/c", live, files={name: b""}, deadline_s=30)
    with holdfast.Checkpointer(root, deadline_s=30) as checkpointer:
        with pytest.raises(holdfast.InvalidArgument, match=f"{name}.*name of an entry of the state"):
            checkpointer.save(1, live, files={name: b""})
        assert checkpointer.restore(live) is None


@pytest.mark.sliced(2)
@pytest.mark.parametrize("name", ["ema", "EMA/notes.txt"])
def test_names_of_this_state_s_entries_are_refused_on_every_rank(tmp_path: Path, name: str) -> None:
    run_ranks(2, save_with_a_clash, str(tmp_path), name)
    assert not (tmp_path / "c").exists()


def test_a_damaged_file_of_a_user_stops_neither_peek_nor_restore(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(), files={"a.txt": "a"}).result()
        (tmp_path / "step-000000000001" / "a.txt").write_text("b")
        peek = checkpointer.peek(verify=True)
        assert peek is not None and peek.step == 1 == checkpointer.restore(state())


def test_a_wrong_file_raises_at_the_call_and_the_next_save_is_good(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(holdfast.InvalidArgument, match=r"training_args\.bin"):
            checkpointer.save(1, state(), files={"training_args.bin": b""})
        assert checkpointer.save(1, state(), files={"a.txt": "a"}).result().step == 1
        assert published(tmp_path / "step-000000000001") == {"a.txt": b"a"}


def test_other_files_make_another_checkpoint_and_the_same_ones_do_not(tmp_path: Path) -> None:
    live = state()
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        attempts = [checkpointer.save(1, live, files={"a.txt": text}).result().manifest.attempt for text in "aab"]
    assert attempts[0] == attempts[1] != attempts[2]
    assert published(tmp_path / "step-000000000001") == {"a.txt": b"b"}


def test_equal_bytes_are_not_encoded_again() -> None:
    encoder = ExtraFileEncoder()
    first = encoder.values({"a": b"1", "b": b"2"})
    second = encoder.values({"a": bytes(bytearray(b"1")), "b": b"3"})
    assert second["extra:a"] is first["extra:a"]
    assert second["extra:b"].digest != first["extra:b"].digest
    assert encoder.values({}) == {} and encoder.values({"a": b"1"})["extra:a"] is not first["extra:a"]


def test_convert_keeps_them(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", state(), files={"tokenizer.json": b"{}"})
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "c"), str(tmp_path / "hf"), "--to", "hf"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == b"{}"


def save_on_rank(root: str, blocking: bool) -> None:
    calls = []

    def fill(folder: str) -> None:
        calls.append(folder)
        Path(folder, "who.txt").write_text(str(dist.get_rank()))

    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    if blocking:
        holdfast.save(f"{root}/step-000000000003", {"model": model}, files=fill)
    else:
        with holdfast.Checkpointer(root) as checkpointer:
            checkpointer.save(3, {"model": model}, files=fill).result()
            with pytest.raises(holdfast.InvalidArgument, match="name of a pickle"):
                checkpointer.save(4, {"model": model}, files={"a.pt": b""})
    assert len(calls) == (1 if dist.get_rank() == 0 else 0)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_files_of_rank_0_are_published(tmp_path: Path, blocking: bool) -> None:
    run_ranks(2, save_on_rank, str(tmp_path), blocking)
    assert published(tmp_path / "step-000000000003") == {"who.txt": b"0"}


def test_a_step_written_from_the_memory_of_an_earlier_start_has_its_files(tmp_path: Path) -> None:
    thesis = tmp_path / "step-000000000001" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with pytest.warns(holdfast.HoldfastWarning, match="thesis"), holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(), files=FILES).wait(60)
    thesis.unlink()
    thesis.parent.rmdir()
    with pytest.warns(holdfast.HoldfastWarning, match="memory of this host"), holdfast.Checkpointer(tmp_path) as again:
        assert again.restore(state()) == 1
    assert published(thesis.parent) == EXPECTED
