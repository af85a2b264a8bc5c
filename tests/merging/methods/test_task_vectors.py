import pytest
import torch

from holdfast.core.errors import InvalidArgument
from tests.merging.methods.whole import run, three

WEIGHTS = [{}, {"weight": 0.7}, {"weight": -0.4}]


def with_density(*densities, **further):
    return [{}, *({"weight": w, "density": d, **further} for w, d in zip((0.7, 0.6), densities, strict=True))]


def test_task_arithmetic_adds_weighted_deltas():
    base, a, b = three(torch.float64)
    found = run("task_arithmetic", [base, a, b], WEIGHTS, **{"lambda": 0.5})
    assert torch.allclose(found, base + 0.5 * (0.7 * (a - base) - 0.4 * (b - base)))


def test_normalization_divides_by_the_weights():
    base, a, b = three(torch.float64)
    found = run("task_arithmetic", [base, a, b], WEIGHTS, normalize=True)
    assert torch.allclose(found, base + (0.7 * (a - base) - 0.4 * (b - base)) / 0.3)


def test_the_base_may_be_at_any_place():
    base, a, b = three()
    first = run("ties", [base, a, b], with_density(0.5, 0.5))
    last = run("ties", [a, b, base], [*with_density(0.5, 0.5)[1:], {}], base_at=2)
    assert torch.equal(first, last)


def test_ties_takes_the_majority_of_the_largest():
    base = torch.zeros(4)
    a, b = torch.tensor([4.0, -3.0, 0.1, 2.0]), torch.tensor([2.0, 5.0, 0.2, -1.0])
    found = run("ties", [base, a, b], [{}, {"weight": 1, "density": 0.75}, {"weight": 1, "density": 0.5}])
    # kept: a 4, -3, 2; b 2, 5. Signs: +, +, -, +: the average of those that agree
    assert found.tolist() == [3.0, 5.0, 0.0, 2.0]


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties", "della", "della_linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(13, 21), (40,), (3, 4, 5)])
def test_chunks_change_nothing(method, dtype, shape):
    values = with_density(0.5, 0.3, **({"epsilon": 0.1} if "della" in method else {}))
    whole = run(method, three(dtype, shape), values)
    assert torch.equal(whole, run(method, three(dtype, shape), values, chunk=8))
    assert whole.dtype == dtype and not torch.equal(whole, three(dtype, shape)[0])


@pytest.mark.parametrize("method", ["dare_linear", "della_linear"])
def test_dropped_changes_are_random_and_the_rest_is_scaled(method):
    base, a = torch.zeros(200, 50), torch.ones(200, 50) + torch.rand(200, 50)
    found = run(method, [base, a], [{}, {"weight": 1, "density": 0.3}])
    kept = found != 0
    assert 0.27 < kept.double().mean() < 0.33
    assert torch.isclose(found.sum(), a.sum(), rtol=1e-5)
    unscaled = run(method, [base, a], [{}, {"weight": 1, "density": 0.3}], rescale=False)
    assert torch.equal(unscaled[kept], a[kept]) and torch.equal(unscaled != 0, kept)


def test_della_keeps_large_changes_more_often():
    base = torch.zeros(300, 40)
    rows = torch.arange(1.0, 41.0).repeat(300, 1)
    kept = run("della_linear", [base, rows], [{}, {"weight": 1, "density": 0.5, "epsilon": 0.4}], rescale=False) != 0
    share = kept.double().mean(dim=0)
    assert share[:5].mean() < 0.25 and share[-5:].mean() > 0.75


@pytest.mark.parametrize("method", ["ties", "dare_linear", "della_linear"])
def test_the_ends_of_density(method):
    base, a, _ = three(torch.float32)
    everything = run(method, [base, a], [{}, {"weight": 1, "density": 1}], normalize=False)
    nothing = run(method, [base, a], [{}, {"weight": 1, "density": 0}], normalize=False)
    assert torch.allclose(everything, a) and torch.equal(nothing, base)


@pytest.mark.parametrize(
    ("values", "text"),
    [({"density": 1.5}, "density 1.5 of m1"), ({"density": 0.9, "epsilon": 0.2}, "between 0 and 1")],
)
def test_impossible_densities_are_refused(values, text):
    base, a, _ = three()
    with pytest.raises(InvalidArgument, match=text):
        run("della", [base, a], [{}, {"weight": 1, **values}])


def test_a_row_of_one_element_has_a_probability():
    base, a = torch.zeros(50, 1), torch.ones(50, 1)
    assert run("della_linear", [base, a], [{}, {"weight": 1, "density": 0.5}], rescale=False).isfinite().all()
