"""Ranks that are threads decide once: what torch's propagation answers one of them, the others take over.

Propagation is most of the time of a case, and the same on every rank but where the answer holds the rank's own sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_flatten, tree_map

from holdfast.spmd.base import torch_decisions

KEPT = 500  # decisions: cases come one by one, and their ranks are never far apart


def decide_together() -> None:
    """Make every propagator of this process share its decisions."""
    alone = ShardingPropagator.propagate_op_sharding_non_cached
    ShardingPropagator.propagate_op_sharding_non_cached = _shared(alone)  # type: ignore[method-assign]


def _shared(alone: Callable[..., Any]) -> Callable[..., Any]:
    lock = ShardingPropagator._fake_mode_lock  # propagation takes it too: two locks could be taken in either order
    answers: dict[Hashable, Any] = {}

    def propagate(self: ShardingPropagator, schema: OpSchema) -> Any:
        key, mesh = _key(schema)
        if mesh is None:
            return alone(self, schema)
        with lock:
            answer = answers.get(key)
            if answer is None:
                try:
                    answer = alone(self, schema)
                except Exception as error:  # noqa: BLE001 - the other ranks shall meet it too
                    answer = error
                if len(answers) >= KEPT:
                    answers.pop(next(iter(answers)))
                answers[key] = answer
        if isinstance(answer, Exception):
            raise answer.with_traceback(None)
        if not isinstance(answer, OutputSharding) or answer.use_val_from_redistribute_schema:
            return alone(self, schema)
        return _on(mesh, answer)

    return propagate


def _key(schema: OpSchema) -> tuple[Hashable, DeviceMesh | None]:
    """Everything that a decision depends on but who asks."""
    leaves, tree = tree_flatten((schema.args_schema, schema.kwargs_schema), is_leaf=_is_spec)
    specs = [leaf for leaf in leaves if _is_spec(leaf)]
    meshes = {id(spec.mesh): spec.mesh for spec in specs}
    if len(meshes) != 1:
        return None, None
    (mesh,) = meshes.values()
    words = tuple(
        (leaf.placements, leaf.tensor_meta, str(leaf)) if _is_spec(leaf) else (type(leaf).__name__, repr(leaf))
        for leaf in leaves
    )
    return (schema.op, str(tree), words, tuple(mesh.shape), torch_decisions.EMPTY_SHARDS.allowed), mesh


def _is_spec(value: object) -> bool:
    return isinstance(value, DTensorSpec)


def _on(mesh: DeviceMesh, sharding: OutputSharding) -> OutputSharding:
    """The same decision on this rank's own mesh."""

    def own(value: Any) -> Any:
        return dataclasses.replace(value, mesh=mesh) if _is_spec(value) else value

    def owned(values: Any) -> Any:
        return tree_map(own, values, is_leaf=_is_spec)

    wanted = sharding.redistribute_schema
    if wanted is not None:
        wanted = OpSchema(wanted.op, owned(wanted.args_schema), owned(wanted.kwargs_schema), wanted.schema_info)
    return OutputSharding(owned(sharding.output_spec), wanted, sharding.needs_redistribute)
