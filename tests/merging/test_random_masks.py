import pytest
import torch

from holdfast.core.errors import InvalidArgument
from holdfast.core.ranks import SingleProcess
from holdfast.merging.methods.base import TensorTask
from holdfast.merging.random_masks import ElementDraws, SequenceDraws, draws_of


def task(key="w", names=("a", "b"), dtype=torch.float32):
    return TensorTask(key, (1000,), 1000, dtype, names, None)


def test_a_number_depends_on_its_position_only():
    draws = ElementDraws(3)
    whole = draws.words("a", "w", 0, 1000)
    for start, count in ((0, 5), (7, 1), (8, 16), (13, 900), (999, 1)):
        assert (draws.words("a", "w", start, count) == whole[start : start + count]).all()


def test_numbers_differ_by_seed_model_and_key():
    first = ElementDraws(3).words("a", "w", 0, 64)
    for other in (
        ElementDraws(4).words("a", "w", 0, 64),
        ElementDraws(3).words("b", "w", 0, 64),
        ElementDraws(3).words("a", "v", 0, 64),
    ):
        assert (first == other).sum() < 3


def test_numbers_are_the_same_forever():
    assert ElementDraws(0).words("a", "w", 0, 3).tolist() == [3420632377, 1303494672, 3325919820]


def test_the_order_of_the_models_changes_nothing():
    a = ElementDraws(3).mask(task(names=("a", "b")), 0, 0, 1000, 0.4)
    b = ElementDraws(3).mask(task(names=("b", "a")), 1, 0, 1000, 0.4)
    assert torch.equal(a, b)


@pytest.mark.parametrize("probability", [0.0, 0.25, 0.9])
def test_as_many_as_the_probability_says(probability):
    draws = ElementDraws(3)
    assert abs(draws.mask(task(), 0, 0, 100_000, probability).double().mean() - probability) < 0.01
    each = torch.full((100_000,), probability)
    assert abs(draws.mask(task(), 0, 0, 100_000, each).double().mean() - probability) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sequence_is_that_of_torch_and_can_be_repeated(dtype):
    draws = SequenceDraws(5)
    torch.manual_seed(5)
    expected = {}
    for key in ("v", "w"):
        for number in (0, 1):
            expected[key, number] = torch.bernoulli(torch.full((1000,), 0.3, dtype=dtype)).bool()
            draws.begin(task(key, dtype=dtype), number)
            first = draws.mask(task(key, dtype=dtype), number, 0, 400, 0.3)
            rest = draws.mask(task(key, dtype=dtype), number, 400, 600, 0.3)
            assert torch.equal(torch.cat([first, rest]), expected[key, number])
    draws.end_scans()
    for (key, number), mask in expected.items():
        for start, count in ((0, 300), (300, 100), (350, 60), (20, 10), (990, 10), (400, 500)):
            found = draws.mask(task(key, dtype=dtype), number, start, count, 0.3)
            assert torch.equal(found, mask[start : start + count])


def test_the_sequence_needs_one_process():
    ranks = SingleProcess()
    assert draws_of("mergekit", 0, ranks).sequential and not draws_of("holdfast", 0, ranks).sequential
    ranks.world = 2
    with pytest.raises(InvalidArgument, match="one sequence over all keys"):
        draws_of("mergekit", 0, ranks)
