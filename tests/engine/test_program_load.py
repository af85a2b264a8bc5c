"""load_program: which program, which weights, which device."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast import InvalidArgument, Mismatch, NotFound, export_program, load_program
from tests.adapters.program.models import AUTO, Cnn, Everything, everything_inputs


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(0)
    model = Cnn().eval()
    return model, export_program(model, (torch.randn(2, 3, 8, 8),), {"pixels": {0: AUTO}})


def test_the_weights_of_a_checkpoint(exported, tmp_path):
    model, program = exported
    holdfast.save(tmp_path / "step-7", {"model": model})
    module = load_program(program, weights=tmp_path / "step-7")
    pixels = torch.randn(3, 3, 8, 8)
    assert torch.equal(module(pixels), model(pixels))
    assert not any(tensor.is_meta for tensor in module.state_dict().values())


def test_the_weights_of_a_run_in_training(tmp_path):
    model = Cnn().train()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "step-8", {"model": model, "optimizer": optimizer, "note": 3})
    program = export_program(model, (torch.randn(2, 3, 8, 8),))
    module = load_program(program, weights=tmp_path / "step-8")
    for key, tensor in model.state_dict().items():
        assert torch.equal(module.state_dict()[key], tensor), key


def test_tied_weights_and_constants_from_a_checkpoint(tmp_path):
    model = Everything().eval()
    args, kwargs = everything_inputs()
    holdfast.save(tmp_path / "tied", {"model": model})
    module = load_program(export_program(model, args, example_kwargs=kwargs), weights=tmp_path / "tied")
    assert torch.equal(module(*args, **kwargs)["logits"], model(*args, **kwargs)["logits"])
    assert dict(module.named_parameters(remove_duplicate=False))["head.weight"].data_ptr() == (
        module.get_parameter("emb.weight").data_ptr()
    )


def test_weights_that_do_not_fit_are_listed(exported, tmp_path):
    _, program = exported
    other = torch.nn.Module()
    other.stem = torch.nn.Conv2d(3, 4, 3)
    holdfast.save(tmp_path / "other", {"model": other})
    with pytest.raises(Mismatch, match=r"(?s)stem\.weight"):
        load_program(program, weights=tmp_path / "other")


def test_a_module_on_meta_is_filled_by_a_load(exported, tmp_path):
    model, program = exported
    holdfast.save(tmp_path / "step-9", {"model": model})
    module = load_program(program, device="meta")
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    holdfast.load(tmp_path / "step-9", {"model": module})
    pixels = torch.randn(2, 3, 8, 8)
    assert torch.equal(module(pixels), model(pixels))


def test_a_program_alone_has_no_weights(exported):
    with pytest.raises(InvalidArgument, match=r"give weights=, or device='meta'"):
        load_program(exported[1])


def test_a_checkpoint_without_a_program_says_how_to_add_one(exported, tmp_path):
    holdfast.save(tmp_path / "step-3", {"model": exported[0]})
    with pytest.raises(NotFound, match="has no program: save it with program="):
        load_program(tmp_path / "step-3")
