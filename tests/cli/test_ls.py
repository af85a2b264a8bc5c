import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import holdfast
from holdfast.core.errors import NotFound
from holdfast.core.names import step_folder
from holdfast.format.manifest import decode_manifest, encode_manifest
from tests.cli.calls import call, process


def test_an_empty_root_says_so(tmp_path):
    done = call("ls", tmp_path)
    assert done.exit_code == 0
    assert done.output == f"no checkpoints under {tmp_path}\n"


def test_a_folder_above_the_root_says_where_the_checkpoints_are(run):
    done = call("ls", run.parent)
    assert done.exit_code == 0
    assert done.output == f"no checkpoints under {run.parent}; found checkpoints under {run}\n"


def test_an_empty_root_is_an_empty_list_in_json(tmp_path):
    assert json.loads(call("ls", "--json", tmp_path).output) == []


def test_steps_are_listed_oldest_first_with_size_and_groups(run):
    done = call("ls", run)
    assert done.exit_code == 0
    head, *rows = [line.split() for line in done.output.splitlines()]
    assert head == ["step", "size", "written", "by", "tensors"]
    assert [row[0] for row in rows] == ["2", "10", "100"]
    assert [row[-3:] for row in rows] == [["model,", "odd,", "optimizer"]] * 3
    assert rows[0][1:3] == [f"{sum(f.stat().st_size for f in data_files(run)) / 1000:.2f}", "kB"]


def data_files(run):
    return [file for file in (run / step_folder(2)).iterdir() if file.name != "holdfast.json"]


def test_columns_are_aligned_with_numbers_to_the_right(run):
    lines = call("ls", run).output.splitlines()
    ends = {line.index(step) + len(step) for line, step in zip(lines, ["step", "2", "10", "100"], strict=True)}
    assert len(ends) == 1


def test_json_has_what_the_manifests_say(run):
    found = json.loads(call("ls", "--json", run).output)
    for entry, (step, parent) in zip(found, [(2, None), (10, 2), (100, 10)], strict=True):
        manifest = holdfast.open(run / step_folder(step)).manifest
        assert entry == {
            "step": step,
            "folder": step_folder(step),
            "good": True,
            "bytes": manifest.total_bytes,
            "created": manifest.created,
            "parent": parent,
            "groups": ["model", "odd", "optimizer"],
            "writer": dict(manifest.writer),
            "metrics": {},
            "notes": [],
        }


def test_tags_and_what_is_not_of_the_living_branch_are_noted(run):
    call("tag", run, "best", "--step", 10)
    (run / step_folder(2)).rename(run / f"abandoned-{step_folder(2)}")
    head, *rows = call("ls", run).output.splitlines()
    assert head.split()[-1] == "notes"
    assert [row.split("  ")[-1].strip() for row in rows] == ["tag best", "model, odd, optimizer", "abandoned"]
    assert [entry["notes"] for entry in json.loads(call("ls", "--json", run).output)] == [
        ["tag best"],
        [],
        ["abandoned"],
    ]


def test_a_damaged_manifest_is_listed_with_its_reason(run):
    manifest = run / step_folder(10) / "holdfast.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":10', b'"step":11'))
    done = call("ls", run)
    assert done.exit_code == 0
    rows = done.output.splitlines()
    assert rows[2].split()[:2] == ["10", "DAMAGED:"]
    assert "step-000000000010/holdfast.json: the digest of the manifest is" in rows[2]
    assert "DAMAGED" not in rows[1] + rows[3]


def test_a_damaged_manifest_is_not_good_in_json(run):
    (run / step_folder(10) / "holdfast.json").write_bytes(b"")
    entry = json.loads(call("ls", "--json", run).output)[1]
    assert (entry["step"], entry["good"]) == (10, False)
    assert "not valid JSON" in entry["problem"]


def test_a_step_without_a_manifest_is_listed_with_its_reason(run):
    (run / step_folder(10) / "holdfast.json").unlink()
    assert "No such file" in call("ls", run).output.splitlines()[2]


def test_a_manifest_of_another_step_is_damage(run):
    shutil.copy(run / step_folder(10) / "holdfast.json", run / step_folder(2) / "holdfast.json")
    assert "its manifest belongs to step 10" in call("ls", run).output.splitlines()[1]


def test_hidden_attempts_and_other_folders_are_not_listed(run):
    for name in (".attempt-1", "logs", "step-7", "step-000000000007.replaced"):
        shutil.copytree(run / step_folder(2), run / name)
    (run / "link").symlink_to(run / step_folder(2))
    assert len(call("ls", run).output.splitlines()) == 4


def test_a_root_that_is_not_there_is_not_found(tmp_path):
    assert isinstance(call("ls", tmp_path / "none").exception, NotFound)


def test_control_characters_of_a_path_do_not_reach_the_table(run):
    hostile = run.with_name("\x1b[31mred\x07\x9b")
    os.rename(run, hostile)
    (hostile / step_folder(10) / "holdfast.json").write_bytes(b"")
    output = call("ls", hostile).output
    assert output.replace("\n", "").isprintable()
    assert r"\x1b[31mred\x07\x9b" in output


def test_a_hundred_checkpoints_take_little_more_than_one(run, tmp_path):
    manifest = decode_manifest((run / step_folder(2) / "holdfast.json").read_bytes(), "w")
    seconds: dict[int, list[float]] = {1: [], 100: []}
    for count, _ in itertools.product(seconds, range(3)):
        root = tmp_path / str(count)
        for step in range(0 if root.exists() else count):
            folder = shutil.copytree(run / step_folder(2), root / step_folder(step))
            (folder / "holdfast.json").write_bytes(encode_manifest(replace(manifest, step=step)))
        before = os.times()
        done = process("ls", root)
        after = os.times()  # the time of the processor: what else this machine does is not counted
        seconds[count].append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
        assert (done.returncode, len(done.stdout.splitlines())) == (0, count + 1)
        assert "DAMAGED" not in done.stdout
    assert min(seconds[100]) < 3 * min(seconds[1])


def test_nothing_is_imported_that_a_list_does_not_need(run):
    code = "import sys; from holdfast.cli.main import main; sys.argv = ['holdfast', 'ls', %r]\ntry: main()\n"
    code += "finally: print([name for name in ('numpy', 'torch', 'holdfast.sources') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code % str(run)], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_metrics_have_a_column_each(tmp_path):
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"note": 1}).result()
        checkpointer.save(2, {"note": 2}, metrics={"loss": 1.23456789, "accuracy": 0.5}).result()
        checkpointer.save(3, {"note": 3}, metrics={"loss": 100.0}).result()
    call("tag", tmp_path, "best", "--step", 2)
    head, *rows = call("ls", tmp_path).output.splitlines()
    assert head.split()[-3:] == ["loss", "accuracy", "notes"]
    assert rows[1].split()[-4:] == ["1.23457", "0.5", "tag", "best"]
    assert rows[2].split()[-1] == "100"
    assert not rows[0].endswith(("100", "0.5"))
    assert rows[2].rindex("100") + 3 == head.index("loss") + 4 == rows[1].index("1.23457") + 7


def test_timings_are_left_out_before_other_metrics(tmp_path):
    timings = {f"eval_{number}_runtime": 1.0 for number in range(6)}
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"n": 1}, metrics={**timings, "eval_loss": 0.5}).result()
    head, _, more = call("ls", tmp_path).output.splitlines()
    assert "eval_loss" in head
    assert more == "1 more metric: --json shows all"


def test_the_best_step_of_a_trainer_is_a_note_and_no_column(tmp_path):
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        for step, best in ((10, 10), (20, 20), (30, -1)):
            checkpointer.save(step, {"n": step}, metrics={"loss": 1.0, "trainer_best": best}).result()
    lines = call("ls", tmp_path).output.splitlines()
    assert lines[0].split() == ["step", "size", "written", "by", "tensors", "loss", "notes"]
    assert [line.split()[0] for line in lines if line.endswith("best")] == ["20"]
