import json

import pytest
import safetensors.torch
import torch

import holdfast
from tests.cli.calls import call, process


@pytest.fixture
def models(tmp_path):
    paths = []
    for number in range(2):
        path = tmp_path / f"m{number}"
        path.mkdir()
        safetensors.torch.save_file({"w": torch.full((4, 2), float(number))}, path / "model.safetensors")
        paths.append(path)
    return paths


def merged(path):
    return safetensors.torch.load_file(path / "model.safetensors")


def test_a_merge_says_what_it_wrote_and_how_to_open_it(models, tmp_path):
    done = process("merge", *models, tmp_path / "out", "--weight", 1, "--weight", 3)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2].startswith(f"wrote {tmp_path}/out: 1 tensor by linear, 2 files, ")
    assert lines[-1] == f'open it with: AutoModelForCausalLM.from_pretrained("{tmp_path}/out")'
    assert torch.equal(merged(tmp_path / "out")["w"], torch.full((4, 2), 0.75))


def test_json_and_removed_bytes(models, tmp_path):
    safetensors.torch.save_file({"w": torch.ones(4), "x": torch.ones(3)}, models[0] / "model.safetensors")
    out = tmp_path / "out"
    done = call("merge", models[0], out, "--method", "passthrough", "--remove", "x", "--json")
    fields = json.loads(done.output)
    assert fields["removed"] == ["x"] and fields["removed_bytes"] == 12 and fields["method"] == "passthrough"
    assert fields["bytes"] == sum(file.stat().st_size for file in out.iterdir())


def test_other_parameters_are_set_by_name(models, tmp_path):
    weights = ["--weight", 1, "--weight", 3]
    assert call("merge", *models, tmp_path / "out", *weights, "--set", "normalize=false").exit_code == 0
    assert torch.equal(merged(tmp_path / "out")["w"], torch.full((4, 2), 3.0))
    done = call("merge", *models, tmp_path / "no", *weights, "--set", "normalize")
    assert "expected NAME=VALUE" in str(done.exception)


def test_models_that_do_not_fit_are_listed_with_exit_code_2(models, tmp_path):
    safetensors.torch.save_file({"v": torch.ones(4)}, models[1] / "model.safetensors")
    done = process("merge", *models, tmp_path / "out", "--weight", 1, "--weight", 1)
    assert done.returncode == 2 and "has no 'w'" in done.stderr and "has 'v'" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_a_dry_run_prints_sizes_memory_and_time_and_writes_nothing(models, tmp_path):
    before = sorted(tmp_path.iterdir())
    done = call("merge", *models, tmp_path / "out", "--dry-run")
    assert done.exit_code == 0 and sorted(tmp_path.iterdir()) == before
    assert f"linear of {models[0]}, {models[1]}" in done.output
    assert "would write 1 tensor (float32 x1), 1 tensor file" in done.output
    assert " s with a storage of 1 GB/s, and " in done.output and "of memory" in done.output
    fields = json.loads(call("merge", *models, tmp_path / "out", "--dry-run", "--json").output)
    assert fields["problems"] == [] and fields["bytes"] > 32 and fields["peak_bytes"] > fields["bytes"]


def test_a_dry_run_lists_all_problems(models, tmp_path):
    safetensors.torch.save_file({"v": torch.ones(4)}, models[1] / "model.safetensors")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    done = call("merge", *models, tmp_path / "out", "--dry-run")
    assert done.exit_code == 1
    assert "would fail: " in done.output and "exists" in done.output
    assert "has no 'w'" in done.output and "has 'v'" in done.output


def test_a_file_describes_the_merge(models, tmp_path):
    (tmp_path / "merge.toml").write_text('models = ["m0", {path = "m1", weight = 3}]\n')
    assert call("merge", "--config", tmp_path / "merge.toml", tmp_path / "out").exit_code == 0
    assert torch.equal(merged(tmp_path / "out")["w"], torch.full((4, 2), 0.75))
    done = call("merge", "--config", tmp_path / "merge.toml", tmp_path / "no", "--dtype", "float16")
    assert "--dtype: with --config, write it into the file" in str(done.exception)
    for flag in ("--weight", "--seed"):
        done = call("merge", "--config", tmp_path / "merge.toml", tmp_path / "no", flag, "2")
        assert f"{flag.strip('-')}: with" in str(done.exception)


def test_steps_of_a_run(tmp_path):
    for step in (5, 10, 20):
        holdfast.save(
            tmp_path / "run" / f"step-{step:012d}", {"model": {"w": torch.full((3,), float(step))}}, step=step
        )
    assert call("merge", tmp_path / "run", tmp_path / "out", "--steps", "10,20").exit_code == 0
    assert merged(tmp_path / "out")["w"].tolist() == [15, 15, 15]
    done = call("merge", tmp_path / "run", tmp_path / "no", "--steps", "last")
    assert "expected numbers" in str(done.exception)


def test_a_merge_of_nothing_says_what_is_missing(tmp_path):
    assert "no models" in str(call("merge", tmp_path / "out").exception)
