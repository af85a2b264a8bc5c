import json

import torch

from tests.cli.calls import call, process


def test_prints_ranks_and_checkpoint(run):
    found = call("size", run, "--dp", 2, "--zero", 3, "--optim", "adamw", "--param", "fp32")
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert "23 parameters in 4 tensors" in lines[0]
    assert lines[1] == "stored: model, 92 B"
    assert "2 ranks on 1 host: dp 2 x tp 1 x pp 1, ep 1, zero 3" in lines
    header, *rows = lines[lines.index("") + 1 :][:3]
    assert header.split()[:2] == ["ranks", "parameters"]
    assert [row.split()[:3] for row in rows] == [["0", "56", "B"], ["1", "36", "B"]]
    assert "a checkpoint takes" in found.output
    assert "not counted: activations" in lines[-1]


def test_json_has_every_figure(run):
    found = call("size", run, "--tp", 1, "--optim", "adamw", "--param", "bf16", "--compute", "fp8", "--json")
    fields = json.loads(found.output)
    rank = fields["ranks"][0]
    assert (rank["parameters"], rank["masters"], rank["optimizer"], rank["gradients"]) == (46, 92, 184, 46)
    assert rank["device_bytes"] == 46 + 92 + 184 + 46
    assert rank["arena_bytes"] > 46 + 92 + 184
    assert rank["restore"]["bytes"] == 46 + 92 + 184 + 4 * 4
    assert fields["checkpoint"]["bytes"] == sum(group["file_bytes"] for group in fields["checkpoint"]["groups"])
    assert fields["run"]["world"] == 1


def test_ranks_that_are_alike_share_a_row(tmp_path):
    import holdfast

    holdfast.save(tmp_path / "made", {"model": torch.nn.Linear(8, 5)})
    found = call("size", tmp_path / "made", "--dp", 5, "--zero", 3)
    assert [line.split("  ")[0] for line in found.output.splitlines() if " B  " in line][:2] == ["0-4", "model"]
    uneven = call("size", tmp_path / "made", "--dp", 4, "--zero", 3).output
    assert [line.split()[:2] for line in uneven.splitlines() if line.count(" B ") > 4] == [
        ["0-1", "72"],
        ["2", "36"],
        ["3", "0"],
    ]


def test_wrong_calls(tmp_path):
    missing = process("size", tmp_path / "missing")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "no such file or folder" in missing.stderr


def test_large_runs_are_printed_in_short(tmp_path):
    import holdfast

    experts = {f"e{n}": torch.nn.Linear(n + 1, 1, bias=False) for n in range(40)}
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(experts.values())})
    holdfast.save(tmp_path / "made", {"model": model})
    lines = call("size", tmp_path / "made", "--pp", 40, "--dp", 3).output.splitlines()
    rows = [line for line in lines if line.count(" B ") > 4]
    assert [row.split("  ")[0] for row in rows] == [f"{3 * n}-{3 * n + 2}" for n in range(24)]
    assert "... and 16 more kinds of ranks; --json has every rank" in lines
    assert "rank 117 needs the most on its device: 160 B" in lines
    uneven = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(2, 3, bias=False)})
    holdfast.save(tmp_path / "uneven", {"model": uneven})
    lines = call("size", tmp_path / "uneven", "--dp", 8, "--tp", 2).output.splitlines()
    rows = [line for line in lines if line.count(" B ") > 4]
    assert rows[0].startswith("0, 2, 4, ... (8 ranks)  ")
    assert rows[1].startswith("1, 3, 5, ... (8 ranks)  ")
