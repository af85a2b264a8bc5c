"""Schemas, read from torch's text and compared with torch's own reading."""

from __future__ import annotations

import pytest
import torch

from holdfast.program.arguments import DtypeValue, Ref
from holdfast.program.operator_table import allowed_overloads
from holdfast.program.schemas import SchemaProblem, parse_schema


def test_every_schema_of_the_table_is_read_as_torch_reads_it():
    for op in sorted(allowed_overloads()):
        _, packet, name = op.split(".")
        overload = getattr(getattr(torch.ops.aten, packet, None), name, None)
        if overload is None:
            continue  # of another version of torch
        schema = parse_schema(str(overload._schema))
        assert schema.op == op
        expected = [
            (argument.name, argument.has_default_value(), argument.kwarg_only)
            for argument in overload._schema.arguments
        ]
        assert [(one.name, one.has_default, one.keyword_only) for one in schema.arguments] == expected
        assert len(schema.returns) == len(overload._schema.returns)


ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
MANY = (
    'aten::f(Tensor?[] a, SymInt[2]? b=None, str c="x, y)", *, ScalarType? d=None, bool e=False) -> (Tensor, Tensor[])'
)


@pytest.mark.parametrize(
    ("schema", "args", "kwargs"),
    [
        (ADD, (Ref("x"), Ref("y")), {}),
        (ADD, (Ref("x"), 1), {"alpha": 2.5}),
        (ADD, (), {"self": Ref("x"), "other": Ref("y")}),
        (MANY, ((Ref("x"), None),), {}),
        (MANY, (Ref("x"), 3, "z"), {"d": DtypeValue("int8")}),
        (MANY, ((), (1, Ref("n"))), {"e": True}),
    ],
)
@pytest.mark.raises_nothing
def test_arguments_that_fit(schema, args, kwargs):
    parse_schema(schema).check(args, kwargs)


@pytest.mark.parametrize(
    ("schema", "args", "kwargs", "message"),
    [
        (ADD, (Ref("x"),), {}, "lacks the argument 'other'"),
        (ADD, (Ref("x"), Ref("y"), 1), {}, "takes 2 positional arguments, not 3"),
        (ADD, (Ref("x"), Ref("y")), {"beta": 1}, "has no argument 'beta'"),
        (ADD, (Ref("x"), Ref("y")), {"self": Ref("x")}, "gets the argument 'self' twice"),
        (ADD, (Ref("x"), "y"), {}, "takes Tensor as 'other'"),
        (ADD, (Ref("x"), Ref("y")), {"alpha": None}, "takes a number as 'alpha'"),
        (MANY, ((Ref("x"),), (1.5,)), {}, "as 'b'"),
        (MANY, ((Ref("x"),), 1, 2), {}, "as 'c'"),
        (MANY, ((Ref("x"),),), {"d": "int8"}, "takes a dtype or nothing as 'd'"),
        (MANY, ((Ref("x"),),), {"e": 1}, "as 'e'"),
    ],
)
def test_arguments_that_do_not_fit(schema, args, kwargs, message):
    with pytest.raises(SchemaProblem, match=message):
        parse_schema(schema).check(args, kwargs)


@pytest.mark.parametrize(
    "text", ["", "aten::add(Tensor self", "torch::add(Tensor self) -> Tensor", "aten::f(()) -> Tensor"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(SchemaProblem):
        parse_schema(text)
