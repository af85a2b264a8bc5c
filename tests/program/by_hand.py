"""Programs made by hand, for tests of plain data."""

from __future__ import annotations

import json
from typing import Any

from holdfast.program.arguments import DeviceValue, DtypeValue, Ref
from holdfast.program.graph import (
    BUFFER,
    CONSTANT,
    PARAMETER,
    SET_GRAD,
    GraphBlock,
    InputEntry,
    Mutation,
    Node,
    Origin,
    StateEntry,
    TensorType,
)
from holdfast.program.model_program import Program
from holdfast.program.sizes import SizeOperation
from holdfast.program.structures import Structure

LINEAR = "aten::linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"
ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
FULL = (
    "aten::full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, "
    "bool? pin_memory=None) -> Tensor"
)
INPUTS = Structure("tuple", (Structure("tuple", (Structure(),)), Structure("dict")))
HIDDEN = TensorType("float32", ("batch", 2))


def program(**changes: Any) -> Program:
    """A layer, a constant added, NaN inside a block without gradients, and a buffer that is written."""
    inner = Node(
        "full",
        "aten.full.default",
        ((2,), float("nan")),
        {"dtype": DtypeValue("float32"), "device": DeviceValue("model")},
        TensorType("float32", (2,)),
    )
    fields: dict[str, Any] = {
        "inputs": (InputEntry("x", TensorType("float32", ("batch", 4))),),
        "input_structure": INPUTS,
        "state": (
            StateEntry("w", PARAMETER, "fc.weight", TensorType("float32", (2, 4)), ("head.weight",)),
            StateEntry("b", PARAMETER, "fc.bias", TensorType("float32", (2,)), frozen=True),
            StateEntry("last", BUFFER, "last", TensorType("float32", (2,))),
            StateEntry("c", CONSTANT, "shift", TensorType("float32", (2,))),
        ),
        "nodes": (
            Node(
                "y",
                "aten.linear.default",
                (Ref("x"), Ref("w"), Ref("b")),
                {},
                HIDDEN,
                Origin("fc", "linear", "net.py:1"),
            ),
            Node("z", "aten.add.Tensor", (Ref("y"), Ref("c")), {"alpha": 2}, HIDDEN, Origin("", "add", "net.py:2")),
            Node("n", SET_GRAD, (False,), {}, (inner.type,), block=GraphBlock((), (inner,), (Ref("full"),))),
            Node("n0", "tuple.item", (Ref("n"), 0), {}, inner.type),
        ),
        "outputs": (Ref("z"), Ref("n0"), None),
        "output_structure": Structure("dict", (Structure(),) * 3, ("logits", "nothing", "cache"), "lib.Output"),
        "operators": {"aten.add.Tensor": ADD, "aten.full.default": FULL, "aten.linear.default": LINEAR},
        "symbols": {"batch": (1, 64)},
        "guards": (SizeOperation("eq", (SizeOperation("mod", ("batch", 2)), 0)),),
        "mutations": (Mutation("last", Ref("n0")),),
        "modules": {"": "lib.Net", "fc": "torch.nn.Linear"},
    }
    return Program(**{**fields, **changes})


def fields(**changes: Any) -> dict[str, Any]:
    """The same as JSON data, to be changed."""
    found: dict[str, Any] = json.loads(program().to_json())
    return {**found, **changes}


def read(data: dict[str, Any]) -> Program:
    return Program.from_json(json.dumps(data).encode())
