"""The layouts of a run's tensors over its ranks: parameters, gradients and optimizer states by ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.layout.box import Box, flat_boxes
from holdfast.layout.placement import (
    Boxes,
    Mesh,
    OnMesh,
    Placement,
    RankLayout,
    Replicate,
    Shard,
    Spread,
    Spreads,
    StridedShard,
    Whole,
)
from holdfast.sizes.model_tensors import ModelTensor
from holdfast.sizes.placement_rules import PlacementRules, TensorRole
from holdfast.sizes.run_shape import RunShape

_Members = list[tuple[RankLayout, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class TensorSpreads:
    """The layouts of one tensor's parts. `scalars` are the ranks that keep scalar states of it."""

    parameter: Spread
    gradient: Spread
    state: Spread
    scalars: Spread


class RunSpreads:
    """The spreads of every tensor of a model in a run.

    ZeRO stage 3 shards each tensor along its first dim, as FSDP2 does. Stages 1 and 2 shard the flat sequence of all
    trained parameters that data-parallel ranks hold alike into equal ranges, as DeepSpeed and Megatron do.
    """

    def __init__(self, tensors: Sequence[ModelTensor], rules: PlacementRules, shape: RunShape) -> None:
        self._shape = shape
        self._made = Spreads()
        self._roles = {tensor.key: rules.role(tensor) for tensor in tensors}
        trained = [tensor for tensor in tensors if tensor.is_parameter and tensor.is_trained]
        self._flat: Mapping[str, Spread] = self._flat_spreads(trained) if shape.zero in (1, 2) and shape.dp > 1 else {}

    def of(self, tensor: ModelTensor) -> TensorSpreads:
        """Return the spreads of a tensor."""
        role, zero = self._roles[tensor.key], self._shape.zero
        shards = zero == 3 and tensor.is_parameter and bool(tensor.shape)
        parameter = self._made.of(
            [member for stage in role.stages for member in self._members(tensor, role, stage, shards=shards)]
        )
        state = self._flat.get(tensor.key, parameter)
        gradient = state if zero == 2 else parameter
        holders = sorted({rank for _, ranks in state.members for rank in ranks})
        return TensorSpreads(parameter, gradient, state, self._made.of([(Whole(), tuple(holders))]))

    def _members(self, tensor: ModelTensor, role: TensorRole, stage: int, *, shards: bool = False) -> _Members:
        shape, ranks = self._shape, self._shape.stage_ranks(stage)
        if not tensor.is_parameter:
            return [(Whole(), ranks)]
        if role.expert_owner is not None:
            copies = shape.expert_copies(stage, role.expert_owner)
            mesh = Mesh(("dp",), (len(copies),), copies)
            return [(OnMesh(mesh, (Shard(0) if shards else Replicate(),)), copies)]
        if role.is_stacked:
            mesh = Mesh(("dp", "ep"), (shape.dp // shape.ep, shape.expert_ranks), ranks)
            inner: Placement = Shard(min(1, len(tensor.shape) - 1)) if shards else Replicate()
            return [(OnMesh(mesh, (inner, Shard(0))), ranks)]
        mesh = Mesh(("dp", "tp"), (shape.dp, shape.tp), ranks)
        outer: Placement = Replicate()
        if shards:
            outer = StridedShard(0, shape.tp) if role.tensor_dim == 0 else Shard(0)
        return [(OnMesh(mesh, (outer, Replicate() if role.tensor_dim is None else Shard(role.tensor_dim))), ranks)]

    def _flat_spreads(self, trained: Sequence[ModelTensor]) -> dict[str, Spread]:
        held: dict[str, _Members] = {tensor.key: [] for tensor in trained}
        for copies, members in self._replicated(trained):
            ends = [sum(box.volume for _, box in members) * part // len(copies) for part in range(len(copies) + 1)]
            for rank, begin, end in zip(copies, ends, ends[1:], strict=False):
                for key, boxes in _range_of(members, begin, end):
                    held[key].append((Boxes(boxes), (rank,)))
        return {key: self._made.of(members) for key, members in held.items()}

    def _replicated(
        self, trained: Sequence[ModelTensor]
    ) -> Iterator[tuple[tuple[int, ...], list[tuple[ModelTensor, Box]]]]:
        """Yield ranks that hold the same parts of parameters, with these parts in order."""
        by_ranks: dict[tuple[int, ...], list[tuple[ModelTensor, Box]]] = {}
        for tensor in trained:
            role = self._roles[tensor.key]
            for stage in role.stages:
                for layout, ranks in self._members(tensor, role, stage):
                    is_expert = role.expert_owner is not None or role.is_stacked
                    for copies, box in self._copies(layout, ranks, tensor.shape, is_expert=is_expert):
                        by_ranks.setdefault(copies, []).append((tensor, box))
        yield from by_ranks.items()

    def _copies(
        self, layout: RankLayout, ranks: tuple[int, ...], shape: tuple[int, ...], *, is_expert: bool
    ) -> Iterator[tuple[tuple[int, ...], Box]]:
        """Yield the boxes of a tensor that one data-parallel rank holds, each with all of its data-parallel copies."""
        run = self._shape
        apart = run.expert_ranks if is_expert else run.tp
        first = ranks[0] - ranks[0] % (run.dp * run.tp)  # of the stage
        for rank, box in layout.boxes(shape, ranks):
            if rank - first < apart and box.volume:
                yield tuple(range(rank, first + run.dp * run.tp, apart)), box


def _range_of(
    members: Sequence[tuple[ModelTensor, Box]], begin: int, end: int
) -> Iterator[tuple[str, tuple[Box, ...]]]:
    """Yield the boxes of elements [begin, end) of a sequence of parts, by key."""
    position = 0
    for tensor, box in members:
        low, high = max(begin, position), min(end, position + box.volume)
        if low < high:
            cut = flat_boxes(box.sizes, low - position, high - position)
            yield tensor.key, tuple(_moved(part, box.offsets) for part in cut)
        position += box.volume


def _moved(box: Box, by: Sequence[int]) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offsets, by, strict=True)), box.sizes)
