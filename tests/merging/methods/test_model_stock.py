import pytest
import torch

from tests.merging.methods.whole import run, three


def test_models_that_agree_give_their_average():
    base, a, _ = three(torch.float32)
    assert torch.allclose(run("model_stock", [base, a, a], [{}] * 3), a, atol=1e-5)


def test_models_at_right_angles_give_the_base():
    base = torch.zeros(4)
    a, b = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0, 1.0, 0, 0])
    assert torch.equal(run("model_stock", [base, a, b], [{}] * 3), base)


def test_opposite_models_give_the_base():
    base, a, _ = three(torch.float64)
    assert torch.allclose(run("model_stock", [base, a, 2 * base - a], [{}] * 3), base)


def test_rows_have_ratios_of_their_own():
    base = torch.zeros(2, 3)
    a = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    b = torch.tensor([[0, 1.0, 0], [1, 1, 1]])
    found = run("model_stock", [base, a, b], [{}] * 3, filter_wise=True)
    assert torch.allclose(found, torch.tensor([[0.0, 0, 0], [1, 1, 1]]))


@pytest.mark.parametrize("filter_wise", [False, True])
def test_chunks_change_nothing(filter_wise):
    models = [*three(), three()[1] + 0.1]
    whole, parts = (run("model_stock", models, [{}] * 4, filter_wise=filter_wise, chunk=c) for c in (1 << 18, 22))
    assert torch.equal(whole, parts)
