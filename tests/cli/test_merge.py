import json

import pytest
import safetensors.torch
import torch

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
    done = process("merge", *models, tmp_path / "no", *weights, "--set", "normalize")
    assert done.returncode == 2 and "expected NAME=VALUE" in done.stderr


def test_models_that_do_not_fit_are_listed_with_exit_code_2(models, tmp_path):
    safetensors.torch.save_file({"v": torch.ones(4)}, models[1] / "model.safetensors")
    done = process("merge", *models, tmp_path / "out", "--weight", 1, "--weight", 1)
    assert done.returncode == 2 and "has no 'w'" in done.stderr and "has 'v'" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()
