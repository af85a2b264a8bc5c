"""Programs that run: outputs, gradients, running statistics and checks, beside the model that was exported."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from holdfast import Mismatch, Program, export_program, load_program
from tests.adapters.program.models import (
    AUTO,
    EVERYTHING_SIZES,
    Cnn,
    Decoder,
    Everything,
    UNet,
    everything_inputs,
)


def _export_everything(model, decompose=False):
    args, kwargs = everything_inputs()
    made = export_program(model, args, EVERYTHING_SIZES, decompose, example_kwargs=kwargs)
    return Program.from_json(made.to_json()), made.constants


def _loaded(model, decompose=False):
    program, constants = _export_everything(model, decompose)
    return load_program(_with(program, constants), weights=model)


def _with(program, constants):
    fields = {name: getattr(program, name) for name in program.__dataclass_fields__}
    return Program(**{**fields, "constants": constants})


@pytest.mark.parametrize("decompose", [False, True], ids=["training", "core"])
def test_everything_is_equal_to_the_model_at_other_sizes(decompose):
    torch.manual_seed(0)
    model = Everything().train()
    module = _loaded(model, decompose)
    args, kwargs = everything_inputs(3, 10)
    expected, found = model(*args, **kwargs), module(*args, **kwargs)
    assert torch.equal(expected["logits"], found["logits"]) and found["sizes"] == expected["sizes"] == (5, None, 3)
    expected["logits"].square().sum().backward()
    found["logits"].square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name  # type: ignore[arg-type]
    own = module.state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, own[key]), key
    assert own["bn.num_batches_tracked"] == 1


def test_tied_weights_are_one_parameter():
    module = _loaded(Everything())
    own = dict(module.named_parameters(remove_duplicate=False))
    assert own["head.weight"] is own["emb.weight"] and len(list(module.parameters())) == 5


def test_a_parameter_without_gradients_stays_so():
    model = Decoder()
    model.emb.weight.requires_grad_(False)
    module = load_program(export_program(model, (torch.randint(0, 64, (2, 8)),)), weights=Decoder())
    module(torch.randint(0, 64, (2, 8))).sum().backward()
    assert [key for key, weight in module.named_parameters() if weight.grad is None] == ["emb.weight"]


MODELS = {
    "cnn": (Cnn, (torch.randn(2, 3, 16, 16),), (torch.randn(5, 3, 16, 16),), {"pixels": {0: AUTO}}),
    "unet": (
        UNet,
        (torch.randn(2, 1, 16, 16), torch.rand(2)),
        (torch.randn(3, 1, 24, 16), torch.rand(3)),
        {"image": {0: AUTO, 2: AUTO}, "time": {0: AUTO}},
    ),
    "decoder": (
        Decoder,
        (torch.randint(0, 64, (2, 8)),),
        (torch.randint(0, 64, (3, 13)),),
        {"ids": {0: AUTO, 1: AUTO}},
    ),
}


EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.sliced(5)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("decompose", [False, True], ids=["training", "core"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_our_own(name, decompose, mode):
    kind, example, other, sizes = MODELS[name]
    torch.manual_seed(1)
    model = kind().train(mode == "train")
    module = load_program(export_program(model, example, sizes, decompose), weights=model)
    reference = copy.deepcopy(model)
    for inputs, exact in ((example, True), (other, False)):
        expected, found = reference(*inputs), module(*inputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if exact and not decompose else 1e-6)
        expected.sum().backward()
        found.sum().backward()
        for (key, parameter), own in zip(reference.named_parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(
                own.grad, parameter.grad, **(EXACT if exact and not decompose else CLOSE), msg=key
            )
            parameter.grad = own.grad = None


def _refused(module, message, *args, **kwargs):
    with pytest.raises(Mismatch, match=message):
        module(*args, **kwargs)


def test_inputs_that_the_program_was_not_exported_for_are_refused_by_name():
    module = _loaded(Everything())
    (ids,), kwargs = everything_inputs()
    _refused(module, r"sizes with \(\w+ % 2\) == 0; here \w+ = 7", ids[:, :7], **kwargs)
    _refused(module, "is 4, but the program was exported for at least 6", ids[:, :4], **kwargs)
    _refused(module, "ids is int32, but the program was exported for int64", ids.int(), **kwargs)
    _refused(module, r"ids has the shape \[8\], but the program was exported for 2 dims: \[batch, ", ids[0], **kwargs)
    _refused(module, "shift was 2 at export and is a constant; here 3", ids, **{**kwargs, "shift": 3})
    _refused(module, "missing: shift", ids, scale=kwargs["scale"])
    _refused(module, "unexpected: other", ids, other=1, **kwargs)
    _refused(module, "scale is a NoneType, not a tensor", ids, scale=None, shift=2)
    _refused(module, "dim 0 of scale is 2, but it was 1 at export and is a constant", ids, scale=torch.ones(2), shift=2)


def test_inputs_may_be_given_by_name():
    model = Decoder()
    ids = torch.randint(0, 64, (2, 8))
    by_position = load_program(export_program(model, (ids,)), weights=model)
    by_name = load_program(export_program(model, {"ids": ids}), weights=model)
    expected = model(ids)
    for module in (by_position, by_name):
        assert torch.equal(module(ids), expected) and torch.equal(module(ids=ids), expected)


class Sums(nn.Module):
    """The same sizes in several inputs, sizes that are multiples of others, and integers as inputs."""

    def forward(self, pairs, first, count: int):
        return {"sum": pairs["a"] + pairs["b"], "both": first.reshape(-1, 2).sum(1) + pairs["a"][:, 0]}, count + 1


def test_sizes_that_belong_together_are_checked():
    half = torch.export.Dim("half")
    inputs = ({"a": torch.ones(4, 3), "b": torch.ones(4, 3)}, torch.ones(8), 2)
    sizes = {"pairs": {"a": {0: half}, "b": {0: half}}, "first": {0: 2 * half}, "count": None}
    module = load_program(export_program(Sums(), inputs, sizes), weights={})
    outputs, count = module({"a": torch.ones(5, 3), "b": torch.ones(5, 3)}, torch.ones(10), 2)
    assert outputs["both"].tolist() == [3.0] * 5 and count == 3
    _refused(module, "is 4, but half is 5", {"a": torch.ones(5, 3), "b": torch.ones(4, 3)}, torch.ones(10), 2)
    _refused(module, r"dim 0 of first is 9", {"a": torch.ones(5, 3), "b": torch.ones(5, 3)}, torch.ones(9), 2)


def test_weights_of_another_shape_or_dtype_or_missing_are_refused():
    model = Decoder()
    program = export_program(model, (torch.randint(0, 64, (2, 8)),))
    state = model.state_dict()
    with pytest.raises(Mismatch, match=r"the weights lack head\.weight"):
        load_program(program, weights={key: value for key, value in state.items() if key != "head.weight"})
    with pytest.raises(Mismatch, match=r"head\.weight is torch\.float32 \[2\], but the program has"):
        load_program(program, weights={**state, "head.weight": torch.ones(2)})
    with pytest.raises(Mismatch, match="cast=True converts dtypes"):
        load_program(program, weights={**state, "head.weight": state["head.weight"].bfloat16()})
    load_program(program, weights={**state, "head.weight": state["head.weight"].bfloat16()}, cast=True)


def test_the_weights_are_copies():
    model = Decoder()
    module = load_program(export_program(model, (torch.randint(0, 64, (2, 8)),)), weights=model)
    before = module.state_dict()["head.weight"].clone()
    with torch.no_grad():
        model.head.weight.zero_()
    assert torch.equal(module.state_dict()["head.weight"], before)


def test_a_constant_missing_is_refused():
    program, _ = _export_everything(Everything())
    with pytest.raises(Mismatch, match="the constant 'mask' is missing"):
        load_program(program, weights=Everything())


def test_values_are_dropped_after_their_last_use():
    """A chain of layers holds few activations at a time without gradients."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    module = load_program(export_program(model, (torch.ones(2, 4),)), weights=model)
    module(torch.ones(2, 4))
    (interpreter,) = module._interpreters.values()
    emptied = [slot for step in interpreter._steps for slot in step[-1]]
    assert len(emptied) == len(set(emptied)) >= 20 * 3 - 1


def test_a_program_trains_as_the_model_does():
    torch.manual_seed(0)
    model = Cnn().train()
    pixels, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    module = load_program(export_program(model, (pixels,)), weights=model)
    for one in (model, module):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.nll_loss(one(pixels), labels).backward()
            optimizer.step()
    for key, tensor in model.state_dict().items():
        assert torch.equal(module.state_dict()[key], tensor), key


def test_constants_and_ties_survive_to_empty():
    model = Everything().eval()
    args, kwargs = everything_inputs()
    module = load_program(_with(*_export_everything(model)), device="meta")
    assert module(args[0].to("meta"), scale=kwargs["scale"].to("meta"), shift=2)["logits"].shape == (2, 8, 32)
    outer = nn.ModuleList([module]).to_empty(device="cpu")
    assert sum(1 for _ in outer.parameters()) == sum(1 for _ in model.parameters())
    module.load_state_dict(model.state_dict())
    assert torch.equal(module(*args, **kwargs)["logits"], model(*args, **kwargs)["logits"])
