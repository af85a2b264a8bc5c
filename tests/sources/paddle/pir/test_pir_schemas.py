"""The schemas of operators that rules call are those of the running torch, or compatible with it."""

from __future__ import annotations

import torch

from holdfast.adapters.program.torch_operators import is_backward_compatible, overload_named, schema_of
from holdfast.program.operator_table import is_allowed
from holdfast.sources.paddle.pir import pir_schemas


def test_every_schema_is_that_of_torch_and_allowed() -> None:
    schemas = pir_schemas._schemas()
    assert len(schemas) > 150
    for op, stored in schemas.items():
        assert is_allowed(op), op
        running = schema_of(overload_named(op))
        assert str(running) == stored or is_backward_compatible(running, stored), (op, torch.__version__)
        assert pir_schemas.schema_of(op) == stored
