import pytest
import torch

from holdfast.core.errors import InvalidArgument
from holdfast.merging.methods.averages import LinearMerge, PassthroughMerge
from holdfast.merging.methods.base import TensorTask
from holdfast.merging.random_masks import ElementDraws

NO_DRAWS = ElementDraws(0)


def task(weights, dtype=torch.bfloat16, **shared):
    names = tuple(map(str, range(len(weights))))
    return TensorTask(
        "w", (4,), 4, dtype, names, None, {"normalize": True, **shared}, tuple({"weight": w} for w in weights)
    )


def test_linear_rounds_once():
    a, b = torch.tensor([1.0, 256.0]).bfloat16(), torch.tensor([2.0**-9, 1.0]).bfloat16()
    found = LinearMerge().merge(task([1, 1], normalize=False), None, 0, [a, b], NO_DRAWS)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (a.double() + b.double()).bfloat16())


def test_linear_keeps_the_precision_of_float64():
    a, b = torch.tensor([1.0]).double(), torch.tensor([2.0**-40]).double()
    assert (
        LinearMerge().merge(task([1, 1], torch.float64, normalize=False), None, 0, [a, b], NO_DRAWS).item()
        == 1 + 2.0**-40
    )


def test_linear_divides_by_the_sum_of_the_weights():
    found = LinearMerge().merge(task([3, 1], torch.float32), None, 0, [torch.ones(2), torch.zeros(2)], NO_DRAWS)
    assert found.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.25), (3, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_linear_in_strips_is_linear_of_all_at_once(monkeypatch, weights, dtype):
    inputs = [torch.randn(1000, dtype=torch.float64).to(dtype) for _ in weights]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    expected = torch.zeros(1000, dtype=exact)
    for tensor, weight in zip(inputs, weights, strict=True):
        expected.addcmul_(tensor, torch.tensor([weight], dtype=exact))
    expected.div_(sum(weights))
    monkeypatch.setattr("holdfast.merging.methods.averages._STRIP_ELEMENTS", 96)
    found = LinearMerge().merge(task(weights, dtype), None, 0, [tensor.clone() for tensor in inputs], NO_DRAWS)
    assert torch.equal(found, expected.to(dtype))


def test_linear_leaves_its_inputs_as_they_are_and_averages_negative_zeros_as_mergekit_does():
    inputs = [torch.tensor([-0.0, 1.0]).bfloat16(), torch.tensor([-0.0, 2.0]).bfloat16()]
    before = [tensor.clone() for tensor in inputs]
    found = LinearMerge().merge(task([1, 1]), None, 0, inputs, NO_DRAWS)
    assert [tensor.tolist() for tensor in inputs] == [tensor.tolist() for tensor in before]
    theirs = (torch.stack(inputs).float() * torch.ones(2, 1)).sum(dim=0) / 2
    assert found.view(torch.int16).tolist() == theirs.bfloat16().view(torch.int16).tolist()


def test_linear_refuses_weights_that_add_up_to_nothing():
    with pytest.raises(InvalidArgument, match="add up to 0"):
        LinearMerge().check(task([1, -1]))


def test_passthrough_scales():
    one = TensorTask("w", (2,), 2, torch.float32, ("a",), None, {}, ({"scale": 2},))
    assert PassthroughMerge().merge(one, None, 0, [torch.ones(2)], NO_DRAWS).tolist() == [2, 2]
