"""Code that uses no DTensor: after `enable()` it is compiled, traced and wrapped as before."""

from __future__ import annotations

import functools
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import holdfast.spmd
from holdfast.spmd.patches.functions import FUNCTIONS

MODULES = {
    "cross_entropy": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda: (torch.randn(4, 3), torch.tensor([0, 1, 2, 1])),
    ),
    "nll_loss": (nn.NLLLoss(), lambda: (torch.randn(4, 3), torch.tensor([0, 1, 2, 1]))),
    "ctc_loss": (
        nn.CTCLoss(),
        lambda: (
            *(torch.randn(6, 2, 5).log_softmax(2), torch.ones(2, 3, dtype=torch.long)),
            *(torch.tensor([6, 6]), torch.tensor([3, 3])),
        ),
    ),
    "instance_norm": (nn.InstanceNorm1d(3), lambda: (torch.randn(2, 3, 5),)),
    "instance_norm_affine": (nn.InstanceNorm2d(3, affine=True), lambda: (torch.randn(2, 3, 5, 5),)),
    "pad": (nn.ConstantPad1d(1, 0.5), lambda: (torch.randn(2, 3),)),
    "circular": (nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), lambda: (torch.randn(1, 1, 5, 5),)),
    "attention": (
        nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: (torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)),
    ),
    "encoder": (nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True), lambda: (torch.randn(2, 3, 8),)),
}


@pytest.fixture(autouse=True)
def _rules():
    holdfast.spmd.enable()
    yield
    holdfast.spmd.disable()


def _first(value):
    return value[0] if isinstance(value, tuple) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_torchscript_of_a_module_compiles_and_computes_the_same(name):
    module, make = MODULES[name]
    inputs = make()
    torch.testing.assert_close(_first(torch.jit.script(module)(*inputs)), _first(module(*inputs)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"scaled_dot_product_attention"}))
@pytest.mark.raises_nothing
def test_torchscript_of_a_function_compiles(name):
    torch.jit.script(getattr(F, name))


@pytest.mark.filterwarnings("ignore")
def test_torchscript_knows_a_builtin_by_its_name():
    @torch.jit.script
    def attend(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(attend(x), F.scaled_dot_product_attention(x, x, x))


@pytest.mark.parametrize("name", ["cross_entropy", "instance_norm", "pad", "circular"])
def test_a_compiled_module_is_one_graph(name):
    module, make = MODULES[name]
    inputs = make()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), module(*inputs))


def test_a_symbolic_trace_names_the_functions_of_torch():
    class Padded(nn.Module):
        def forward(self, x):
            return F.pad(x, (1, 1))

    traced = fx.symbolic_trace(Padded())
    assert "torch.nn.functional.pad" in traced.code
    assert traced(torch.zeros(2)).shape == (4,)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_known_by_its_name_and_signature(name):
    function = getattr(F, name)
    holdfast.spmd.disable()
    own = getattr(F, name)
    assert function is not own
    assert (function.__name__, function.__doc__) == (own.__name__, own.__doc__)
    if inspect.isfunction(own):
        assert function.__module__ == own.__module__
        assert inspect.signature(function) == inspect.signature(own)
    holdfast.spmd.enable()
    assert pickle.loads(pickle.dumps(getattr(F, name))) is getattr(F, name)


def test_another_library_s_wrapper_outlives_the_rules():
    calls = []
    ours = F.pad

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        calls.append(args)
        return ours(*args, **kwargs)

    F.pad = theirs
    try:
        holdfast.spmd.disable()
        assert F.pad is theirs
        assert F.pad(torch.zeros(2), (1, 1)).shape == (4,)
        assert len(calls) == 1
        holdfast.spmd.enable()
        holdfast.spmd.disable()
        assert F.pad is theirs
    finally:
        holdfast.spmd.disable()
        F.pad = ours.__wrapped__
