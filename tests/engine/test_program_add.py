"""add_program: a committed checkpoint gets its program, or stays as it is."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast import Damaged, InvalidArgument, Mismatch, NotFound, add_program, export_program, load_program
from tests.adapters.program.models import Cnn, Everything, everything_inputs


@pytest.fixture
def step(tmp_path):
    torch.manual_seed(0)
    model = Everything().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "step-000000000007"
    holdfast.save(path, {"model": model, "optimizer": optimizer, "note": 1}, files={"notes/a.txt": "hello"})
    args, kwargs = everything_inputs()
    return path, model, export_program(model, args, example_kwargs=kwargs)


def test_a_program_is_added_and_everything_else_stays(step):
    path, model, program = step
    before = {
        file.name: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "holdfast.json"
    }
    manifest = holdfast.open(path).manifest
    added = add_program(path, program)
    assert added.verify().good and added.program == program
    after = {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert before.items() <= after.items()
    assert (added.manifest.step, added.manifest.parent) == (7, manifest.parent)
    args, kwargs = everything_inputs()
    assert torch.equal(load_program(path)(*args, **kwargs)["logits"], model(*args, **kwargs)["logits"])
    assert sorted(entry.name for entry in path.parent.iterdir() if "attempt" in entry.name) == []


def test_a_program_is_replaced(step):
    path, model, program = step
    add_program(path, program)
    args, kwargs = everything_inputs()
    other = export_program(model.train(), args, example_kwargs=kwargs)
    assert add_program(path, other).program == other
    assert holdfast.open(path).verify().good


def test_a_checkpoint_with_other_weights_stays_as_it_is(step):
    path, _, _ = step
    manifest = (path / "holdfast.json").read_bytes()
    with pytest.raises(Mismatch, match="of another model"):
        add_program(path, export_program(Cnn().eval(), (torch.randn(1, 3, 8, 8),)))
    assert (path / "holdfast.json").read_bytes() == manifest


def test_a_damaged_file_is_not_copied(step):
    path, _, program = step
    (tensors,) = path.glob("model-*.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(Damaged, match=r"model-.*the block at 0 has a wrong digest"):
        add_program(path, program)
    assert holdfast.open(path).program is None


def test_wrong_arguments(step, tmp_path):
    path, model, program = step
    with pytest.raises(InvalidArgument, match="program=Everything"):
        add_program(path, model)
    with pytest.raises(NotFound, match="no such checkpoint"):
        add_program(tmp_path / "missing", program)


def test_names_of_the_hub_are_followed(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make setup")
    config = transformers.Qwen2MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, moe_intermediate_size=8, shared_expert_intermediate_size=8, num_experts=4,
        num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    model.set_experts_implementation("batched_mm")
    ids = torch.randint(0, 32, (1, 5))
    program = export_program(model, {"input_ids": ids})
    holdfast.save(tmp_path / "step-1", {"model": model})
    added = add_program(tmp_path / "step-1", program)
    assert added.program is not None and added.program.mapping
    expected = model(ids).logits
    assert torch.equal(load_program(tmp_path / "step-1")(input_ids=ids).logits, expected)
    model.save_pretrained(tmp_path / "hub")
    assert torch.equal(load_program(tmp_path / "step-1", weights=tmp_path / "hub")(input_ids=ids).logits, expected)
