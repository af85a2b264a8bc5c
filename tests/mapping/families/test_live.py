"""Built-in mappings between files and live models of transformers: weights and optimizer, by name alone."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import holdfast
from tests.mapping.families.models import CASES, assert_same, stored

pytestmark = pytest.mark.slow  # models of transformers


def fresh(case: str) -> torch.nn.Module:
    config_class, options = CASES[case]
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**options)).bfloat16()


def stepped(model: torch.nn.Module) -> torch.optim.AdamW:
    """An optimizer whose every moment is random."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def moments(model: torch.nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    found = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return {f"{name}/{key}": value for name, state in found.items() for key, value in state.items()}


@pytest.mark.parametrize("case", ["qwen3-moe with dense layers", "mixtral", "deepseek-v3"])
def test_files_with_experts_apart_and_a_model_with_stacked_ones(tmp_path: Path, case: str) -> None:
    model = fresh(case)
    optimizer = stepped(model)
    holdfast.save(tmp_path / "apart", {"model": model, "optimizer": optimizer}, mapping="from-stacked")
    names = {key for file in (tmp_path / "apart").glob("model*.safetensors") for key in load_file(file)}
    assert names == stored(case).tensors.keys()
    other = fresh(case)
    others = stepped(other)
    holdfast.load(tmp_path / "apart", {"model": other, "optimizer": others}, mapping="stacked")
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(moments(other, others), moments(model, optimizer))


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral", "deepseek-v3"])
def test_transformers_opens_what_was_saved_with_experts_apart(tmp_path: Path, case: str) -> None:
    model = fresh(case)
    holdfast.save(tmp_path / "apart", {"model": model}, mapping="from-stacked")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "apart", dtype=torch.bfloat16)
    assert_same(dict(again.bfloat16().state_dict()), dict(model.state_dict()))  # some buffers come as float32


def test_a_folder_of_transformers_loads_by_the_variant_alone(tmp_path: Path) -> None:
    model = fresh("qwen3-moe")
    model.save_pretrained(tmp_path / "hub")
    other = fresh("qwen3-moe")
    holdfast.load(tmp_path / "hub", {"model": other}, mapping="stacked")
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
