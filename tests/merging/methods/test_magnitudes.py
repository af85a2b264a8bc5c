import pytest
import torch

from holdfast.merging.methods.magnitudes import largest_elements, magnitude_bits


def chunks(elements, size):
    return [(start, min(elements, start + size)) for start in range(0, elements, size)]


def chosen(delta, count, size):
    found = largest_elements(lambda start, stop: delta[start:stop], count, chunks(len(delta), size))
    return torch.cat([found.mask(delta[start:stop], start) for start, stop in chunks(len(delta), 37)])


def sorted_stably(delta, count):
    mask = torch.zeros(len(delta), dtype=torch.bool)
    mask[delta.abs().float().sort(descending=True, stable=True).indices[:count]] = True
    return mask


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("levels", [3, 1000])
def test_they_are_those_of_a_stable_sort(dtype, levels):
    generator = torch.Generator().manual_seed(levels)
    delta = (torch.randint(-levels, levels, (997,), generator=generator) / levels).to(dtype)
    for count in (1, 500, 997):
        for size in (61, 2000):
            assert torch.equal(chosen(delta, count, size), sorted_stably(delta, count))


def test_equal_magnitudes_are_taken_by_position():
    assert chosen(torch.tensor([1.0, -1, 1, 2, -1]), 3, 2).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_order_like_magnitudes(dtype):
    values = torch.tensor([0.0, -1e-7, 1e-4, -0.5, 1.0, -3.0, float("inf")]).to(dtype)
    bits = magnitude_bits(values)
    assert (bits[1:] > bits[:-1]).all() if dtype != torch.float16 else (bits[1:] >= bits[:-1]).all()
