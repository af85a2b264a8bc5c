"""`plan_memory`: the memory of every rank of a run, and the checkpoints that it writes, without a process of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument
from holdfast.engine.options import LoadOptions, SaveOptions
from holdfast.sizes.checkpoint_sizes import CheckpointSize, restore_sizes, save_sizes
from holdfast.sizes.find_model import find_model
from holdfast.sizes.model_tensors import ModelTensors
from holdfast.sizes.placement_rules import PlacementRules
from holdfast.sizes.precision import Precision
from holdfast.sizes.rank_memory import MemoryCounter, RankMemory
from holdfast.sizes.run_shape import RunShape
from holdfast.sizes.run_spreads import RunSpreads
from holdfast.sizes.saved_state import SavedState

_MOST_RANKS = 64  # arenas of larger runs are planned for the first rank of each stage
_SHOWN_KEYS = 3
_HEADS = ("num_attention_heads", "n_head", "num_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Sizes of a run. `stored` are the groups of the checkpoint that was given, as they are on disk."""

    model: ModelTensors
    shape: RunShape
    precision: Precision
    ranks: tuple[RankMemory, ...]
    checkpoint: CheckpointSize
    stored: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def most(self) -> RankMemory:
        """The rank that needs the most memory on its device."""
        return max(self.ranks, key=lambda rank: rank.device_bytes)


def plan_memory(
    source: Any,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    zero: int = 0,
    param: str | None = None,
    compute: str | None = None,
    grads: str | None = None,
    optim: str = "none",
    masters: str | None = None,
    model_dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    block_bytes: int = limits.BLOCK_BYTES,
    ranks_per_host: int = 8,
    ranks: Sequence[int] | None = None,
) -> MemoryPlan:
    """Return the memory that every rank of a run needs, and the sizes of its checkpoints.

    `source` is a module (on the meta device, too), a checkpoint of any format that `open` reads, the root of a run, or
    a Hugging Face config.json or a folder with one, for which transformers builds the model without memory. The other
    options are the run's: ranks of data, tensor, pipeline and expert parallelism, the ZeRO stage, and formats (fp32,
    bf16, fp16; for `compute` also fp8, fp8-row, fp8-block128, mxfp8, mxfp4, nvfp4, whose copies have scales).
    `optim` names the optimizer; without one the model is only held. Weights below fp32 have fp32 `masters` unless
    these are "none". `model_dtype`, `max_shard_size` and `block_bytes` are those of the Checkpointer. Arenas of saves
    are planned for all `ranks`, or by default for at most 64: in a larger run for the first rank of each stage.

    The checkpoint's files and the arenas come from the plan that a save makes; activations, buffers of
    communication and the parameters that FSDP gathers for a layer are not counted.
    """
    shape = RunShape(dp=dp, tp=tp, pp=pp, ep=ep, zero=zero, ranks_per_host=ranks_per_host)
    precision = Precision.of(param, compute, grads, masters, optim)
    options = SaveOptions(max_shard_size=max_shard_size, block_bytes=block_bytes, model_dtype=model_dtype)
    found = find_model(source)
    model, rules = found.model, PlacementRules(found.model.tensors, found.model.aliases, shape)
    spreads = RunSpreads(model.tensors, rules, shape)
    state, counter = SavedState(options.model_dtype), MemoryCounter(shape)
    for tensor in model.tensors:
        held = spreads.of(tensor)
        counter.add(tensor, held, precision, is_computed=rules.is_computed(tensor))
        state.add(tensor, held, precision)
    planned = _planned_ranks(shape, ranks)
    agreement = state.agreement(shape.hosts, model.aliases)
    checkpoint, arenas = save_sizes(agreement, options, planned)
    restores = restore_sizes(agreement, shape.ranks_per_host, LoadOptions())
    return MemoryPlan(
        model=model,
        shape=shape,
        precision=precision,
        ranks=tuple(
            RankMemory(rank=rank, arena_bytes=arenas.get(rank), restore=restores[rank], **counter.bytes_of(rank))
            for rank in range(shape.world)
        ),
        checkpoint=checkpoint,
        stored=found.stored,
        notes=(*model.notes, *_notes(rules, model, shape, planned)),
    )


def _planned_ranks(shape: RunShape, ranks: Sequence[int] | None) -> list[int]:
    """Return the ranks whose arenas are planned."""
    if ranks is not None:
        wrong = [rank for rank in ranks if not 0 <= rank < shape.world]
        if wrong:
            raise InvalidArgument(f"ranks={list(ranks)!r}: this run has the ranks 0 to {shape.world - 1}")
        return sorted(set(ranks))
    if shape.world <= _MOST_RANKS:
        return list(range(shape.world))
    return [shape.stage_ranks(stage)[0] for stage in range(shape.pp)]


def _notes(rules: PlacementRules, model: ModelTensors, shape: RunShape, planned: Sequence[int]) -> Iterator[str]:
    whole = rules.unsplit(model.tensors) if shape.tp > 1 else []
    if whole:
        more = f" and {len(whole) - _SHOWN_KEYS} more" if len(whole) > _SHOWN_KEYS else ""
        yield f"every tensor-parallel rank holds {', '.join(whole[:_SHOWN_KEYS])}{more} whole"
    yield from _undivided_heads(model.config, shape.tp)
    if len(planned) < shape.world:
        yield f"arenas were planned for {len(planned)} of {shape.world} ranks"


def _undivided_heads(config: Mapping[str, Any], tp: int) -> Iterator[str]:
    """Yield a note for each number of heads of attention that tensor parallelism does not divide."""
    text = config.get("text_config")
    fields = {**config, **(text if isinstance(text, dict) else {})}
    heads = next((fields[name] for name in _HEADS if type(fields.get(name)) is int), None)
    if heads is not None and heads % tp:
        yield f"{heads} attention heads do not divide by tp={tp}: a head would be split, which most code refuses"
    shared = fields.get("num_key_value_heads")
    if type(shared) is int and shared != heads and shared % tp:
        yield (
            f"{shared} key and value heads do not divide by tp={tp}: k_proj and v_proj are counted as split, but most "
            "tensor-parallel implementations hold whole heads, some of them on several ranks"
        )
