"""Adapters stay adapters in a conversion to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import holdfast
from holdfast.cli.convert import command
from tests.adapters.peft_cases import adapted, open_base, optimizer_of, train_step, write_base

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
peft = pytest.importorskip("peft", reason="peft is not installed: make setup")


def run(*arguments: Any) -> str:
    outcome = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


@pytest.mark.parametrize("base_mode", ["reference", "full"])
def test_a_step_with_two_adapters_becomes_two_adapters(tmp_path: Path, base_mode: str) -> None:
    model = adapted(open_base(write_base(tmp_path / "base")), "lora", "dora")
    optimizer = optimizer_of(model)
    train_step(model, optimizer, 0)
    state = {"model": model, "optimizer": optimizer, "ema": holdfast.EMA(model, 0.5)}
    holdfast.save(tmp_path / "x", state, base=base_mode)
    run(tmp_path / "x", tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16")
    adapters = ["adapter_config.json", "adapter_model.safetensors"]
    files = sorted(str(file.relative_to(tmp_path / "hf")) for file in (tmp_path / "hf").rglob("*") if file.is_file())
    assert files == sorted([*adapters, *(f"dora/{file}" for file in adapters)])
    for folder in ("", "dora"):
        ours = load_file(tmp_path / "hf" / folder / "adapter_model.safetensors")
        theirs = load_file(tmp_path / "x" / folder / "adapter_model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], value.bfloat16()) for key, value in theirs.items())
        peft.PeftModel.from_pretrained(open_base(tmp_path / "base"), str(tmp_path / "hf" / folder))


def test_a_converted_checkpoint_is_one_of_adapters(tmp_path: Path) -> None:
    model = adapted(open_base(write_base(tmp_path / "base")), "lora")
    holdfast.save(tmp_path / "x", {"model": model}, step=3)
    run(tmp_path / "x", tmp_path / "y")
    one, two = holdfast.open(tmp_path / "x").manifest, holdfast.open(tmp_path / "y").manifest
    assert one.content() == two.content() and one.bases == two.bases
    model.save_pretrained(tmp_path / "theirs")
    run(tmp_path / "theirs", tmp_path / "z")
    assert holdfast.open(tmp_path / "z").manifest.groups["model"].files == ("adapter_model.safetensors",)
    live = adapted(open_base(tmp_path / "base"), "lora", seed=7)
    holdfast.load(tmp_path / "z", {"model": live})
    assert all(torch.equal(live.state_dict()[key], value) for key, value in model.state_dict().items())
