"""export_program: what a program says of a model, and what is refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from holdfast import HoldfastWarning, InvalidArgument, Unsupported, export_program
from holdfast.program.graph import BUFFER, CONSTANT, PARAMETER, SpecializedSize, TensorType
from holdfast.program.sizes import size_text
from tests.adapters.program.models import EVERYTHING_SIZES, Cnn, Everything, everything_inputs


@pytest.fixture(scope="module")
def everything():
    model = Everything().train()
    args, kwargs = everything_inputs()
    return export_program(model, args, EVERYTHING_SIZES, example_kwargs=kwargs)


def test_weights_are_keys_and_tied_ones_are_one(everything):
    kinds = {entry.key: (entry.kind, entry.aliases) for entry in everything.state}
    assert kinds["emb.weight"] == (PARAMETER, ("head.weight",))
    assert kinds["bn.running_mean"] == (BUFFER, ())
    assert kinds["mask"] == (CONSTANT, ())
    assert np.isneginf(everything.constants["mask"]).all()
    assert set(everything.keys()) == set(Everything().state_dict()) - {"head.weight"}


def test_sizes_have_the_names_of_dims_and_guards_are_kept(everything):
    (ids,) = [entry for entry in everything.inputs if entry.name == "ids"]
    assert isinstance(ids.type, TensorType) and ids.type.shape[0] == "batch"
    length = ids.type.shape[1]
    assert everything.symbols[length] == (6, None) and everything.symbols["batch"] == (0, None)
    assert f"({length} % 2) == 0" in [size_text(guard) for guard in everything.guards]


def test_the_mode_is_written(everything):
    assert everything.training
    assert not export_program(Cnn().eval(), (torch.randn(1, 3, 8, 8),)).training


def test_parameters_without_gradients_are_written():
    model = Cnn()
    model.stem.weight.requires_grad_(False)
    made = export_program(model, (torch.randn(1, 3, 8, 8),))
    assert [entry.key for entry in made.state if entry.frozen] == ["stem.weight"]


def test_every_node_has_its_module_and_its_line(everything):
    for node in everything.walk():
        if not node.op.startswith(("size.", "aten.sym_size")):
            assert node.origin.module in everything.modules
            assert ":" in node.origin.line, node
    (batch_norm,) = [node for node in everything.nodes if node.op == "aten.batch_norm.default"]
    assert batch_norm.origin.module == "bn" and batch_norm.origin.line.startswith("torch/nn/modules/batchnorm.py:")
    assert everything.modules["bn"] == "torch.nn.modules.batchnorm.BatchNorm1d"


def test_every_decomposed_node_has_its_composite():
    args, kwargs = everything_inputs()
    core = export_program(Everything().train(), args, EVERYTHING_SIZES, decompose=True, example_kwargs=kwargs)
    found = {
        node.op: node.origin.composite for node in core.walk() if not node.op.startswith(("size.", "aten.sym_size"))
    }
    assert all(found.values()), found
    assert found["aten._native_batch_norm_legit_functional.default"][1] == "aten.batch_norm.default"
    assert len(core.mutations) == 3 and core.dialect == "core"


def test_no_device_but_that_of_the_model_is_written(everything):
    assert b'"cpu"' not in everything.to_json() and b'{"$device":"model"}' in everything.to_json()


def test_a_model_on_the_meta_device_gives_the_same_program():
    torch.manual_seed(0)
    in_memory = Cnn().eval()
    with torch.device("meta"):
        model = Cnn().eval()
        pixels = torch.randn(2, 3, 8, 8)
    assert export_program(model, (pixels,)).to_json() == export_program(in_memory, (torch.randn(2, 3, 8, 8),)).to_json()


class Rotary(nn.Module):
    """Computes its buffer in reset_parameters, if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.inv_freq.copy_(1 / 10 ** torch.arange(4.0, device=self.get_buffer("inv_freq").device))

    def forward(self, x):
        return x * self.inv_freq


def test_a_buffer_on_the_meta_device_is_computed():
    with torch.device("meta"):
        model, x = Rotary(), torch.ones(4)
    assert export_program(model, (x,)).constants["inv_freq"].tolist() == Rotary().inv_freq.tolist()


def test_a_buffer_on_the_meta_device_that_nothing_computes_is_refused():
    class Lost(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("lost", torch.ones(4), persistent=False)

        def forward(self, x):
            return x * self.lost

    with torch.device("meta"):
        model, x = Lost(), torch.ones(4)
    with pytest.raises(Unsupported, match="buffer lost is on the meta device"):
        export_program(model, (x,))


def test_a_size_that_became_constant_is_reported():
    class Unrolled(nn.Module):
        def forward(self, x):
            total = x[:, 0]
            for place in range(1, int(x.shape[1])):
                total = total * 0.5 + x[:, place]
            return total

    with pytest.warns(HoldfastWarning, match="dim 1 of x is 5"):
        made = export_program(Unrolled(), (torch.randn(3, 5),), {"x": {0: Dim.AUTO, 1: Dim.AUTO}})
    assert made.specialized == (SpecializedSize("x", 1, 5),)


def test_uninitialized_memory_becomes_zeros():
    class Fresh(nn.Module):
        def forward(self, x):
            return torch.empty(2, 2).fill_(1) + x.new_empty(2, 2).fill_(2) + torch.empty_like(x).fill_(3)

    made = export_program(Fresh(), (torch.ones(2, 2),))
    assert {"aten.zeros.default", "aten.new_zeros.default", "aten.zeros_like.default"} <= set(made.operators)


@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


def _module(function):
    class Called(nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    return Called()


def test_a_custom_operator_is_refused_by_name():
    with pytest.raises(Unsupported, match=r"mine\.twice\.default .*is a custom operator"):
        export_program(_module(twice), (torch.ones(2),))


def test_a_loop_over_values_is_refused_with_the_way_out():
    def loop(x):
        total = x
        for _ in range(int(x.sum().item())):
            total = total * 2
        return total

    with pytest.raises(Unsupported, match=r"decides by the values of its tensors.*torch\.where"):
        export_program(_module(loop), (torch.ones(2),))


def test_an_operator_with_functions_is_refused_by_name():
    def branches(x):
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    with pytest.raises(Unsupported, match=r"cond .*operator with functions as arguments"):
        export_program(_module(branches), (torch.ones(2),))


def test_a_dataclass_among_the_inputs_is_refused():
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor

    with pytest.raises(Unsupported, match="inputs of a program are tensors"):
        export_program(_module(lambda batch: batch.x), (Batch(torch.ones(2)),))


def test_wrong_examples_are_an_argument_error():
    with pytest.raises(InvalidArgument, match="give a tuple of inputs"):
        export_program(Cnn(), 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="on several devices"):
        model = Cnn()
        model.head.to("meta")
        export_program(model, (torch.randn(1, 3, 8, 8),))


def test_sparse_tensors_are_refused():
    with pytest.raises(Unsupported):
        export_program(_module(lambda x: x.to_sparse()), (torch.ones(2, 2),))
