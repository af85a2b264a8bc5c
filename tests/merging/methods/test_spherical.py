import math

import pytest
import torch

from tests.merging.methods.whole import run, three


def test_the_way_is_on_the_sphere():
    base, other = torch.zeros(6), torch.zeros(6)
    base[0], other[3] = 1, 1
    found = run("slerp", [base, other], [{}, {}], t=1 / 3)
    assert torch.allclose(found[[0, 3]], torch.tensor([math.cos(math.pi / 6), math.sin(math.pi / 6)]))


@pytest.mark.parametrize(("t", "place"), [(0.0, 0), (1.0, 1)])
def test_it_goes_from_the_base_to_the_other(t, place):
    pair = three(torch.float32)[:2]
    assert torch.allclose(run("slerp", pair, [{}, {}], t=t), pair[place], atol=1e-6)
    assert torch.allclose(run("slerp", pair[::-1], [{}, {}], base_at=1, t=t), pair[place], atol=1e-6)


def test_parallel_vectors_are_interpolated_linearly():
    base = torch.ones(5)
    assert torch.allclose(run("slerp", [base, 3 * base], [{}, {}], t=0.5), 2 * base)
    assert torch.allclose(run("slerp", [base, -base], [{}, {}], t=0.25), 0.5 * base)
    assert torch.equal(run("slerp", [0 * base, 0 * base], [{}, {}], t=0.25), 0 * base)


def test_chunks_change_nothing():
    pair = [tensor.bfloat16() for tensor in three(torch.float32, (64, 9))[:2]]
    whole, parts = (run("slerp", pair, [{}, {}], t=0.4, chunk=chunk).double() for chunk in (1 << 18, 7))
    assert torch.allclose(whole, parts, rtol=2**-8)
