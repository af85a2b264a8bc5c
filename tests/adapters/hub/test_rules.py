"""Every architecture: what save_pretrained writes is loaded, what Holdfast writes is the same and opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from tests.adapters.hub.architectures import CONVERTED, SAME_NAMES, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")

# One for each kind of rule: experts, experts beside shared ones, towers under another prefix, a renamed encoder.
SLICE = ["mixtral", "deepseek_v3", "gemma3", "vit"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The keys that only one side has, or whose tensors differ in a bit, shape or dtype."""
    out = sorted(one.keys() ^ other.keys())
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(bits(a), bits(b)):
            out.append(key)
    return out


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in a folder's model files."""
    return {key: tensor for file in folder.glob("model*.safetensors") for key, tensor in load_file(file).items()}


def check(model: Any, folder: Path) -> None:
    """Save by both, load by both, and compare."""
    model.save_pretrained(folder / "theirs")
    loaded = type(model)(model.config).to(model.dtype)
    holdfast.load(folder / "theirs", {"model": loaded})
    assert not differing(model.state_dict(), loaded.state_dict()), "load of save_pretrained's folder"
    holdfast.save(folder / "ours", {"model": model})
    assert not differing(tensors_of(folder / "theirs"), tensors_of(folder / "ours")), "keys and bytes of the save"
    opened, info = type(model).from_pretrained(folder / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert not differing(model.state_dict(), opened.state_dict()), "from_pretrained of Holdfast's folder"
    again = type(model)(model.config).to(model.dtype)
    holdfast.load(folder / "ours", {"model": again})
    assert not differing(model.state_dict(), again.state_dict()), "load of Holdfast's folder"
    holdfast.save(folder / "opened", {"model": opened})
    assert not differing(tensors_of(folder / "ours"), tensors_of(folder / "opened")), "save of the opened model"


def test_the_list_has_at_least_120_architectures() -> None:
    assert len({*CONVERTED, *SAME_NAMES}) >= 120 and set(SLICE) < set(CONVERTED)


@pytest.mark.parametrize(
    "model_type",
    [*SLICE, *(pytest.param(name, marks=pytest.mark.full) for name in (*CONVERTED, *SAME_NAMES) if name not in SLICE)],
)
def test_round_trips(tmp_path: Path, model_type: str) -> None:
    check(tiny_model(model_type), tmp_path)


@pytest.mark.full
def test_round_trips_in_bfloat16(tmp_path: Path) -> None:
    check(tiny_model("qwen3_moe").to(torch.bfloat16), tmp_path)


def test_rules_of_a_class_that_leads_with_a_mixin_are_found(tmp_path: Path) -> None:
    from transformers import Dinov2Backbone, Dinov2Config

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    check(Dinov2Backbone(Dinov2Config(**sizes)), tmp_path)
