"""The table of Paddle's operators that have an aten counterpart: a rule for each, by name."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.sources.paddle.pir.pir_creation import CREATION
from holdfast.sources.paddle.pir.pir_indexing import INDEXING
from holdfast.sources.paddle.pir.pir_layers import LAYERS
from holdfast.sources.paddle.pir.pir_pointwise import POINTWISE
from holdfast.sources.paddle.pir.pir_pooling import POOLING
from holdfast.sources.paddle.pir.pir_reductions import REDUCTIONS
from holdfast.sources.paddle.pir.pir_shapes import SHAPES, Rule

RULES: Mapping[str, Rule] = {**POINTWISE, **CREATION, **SHAPES, **INDEXING, **REDUCTIONS, **LAYERS, **POOLING}
