"""A layout: ranks of each kind of parallelism, layers of each stage, a model's constraints, nearest valid layouts.

Ranks are numbered with pipeline stages outermost and tensor parallelism innermost. Expert
parallelism uses no additional ranks: `ep` neighboring data-parallel ranks and all ranks of their
tensor groups share the experts of a layer. If the data-parallel size exceeds `ep`, experts are
replicated or sharded by FSDP.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.core.errors import InvalidArgument
from holdfast.train.models.model_config import ModelConfig

SCHEDULES = ("1f1b", "interleaved")
_SUGGESTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the axes. Tensor parallelism includes sequence parallelism.

    `zero1` keeps whole parameters and shards the optimizer's state over `dp_replicate`.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero1: bool = False
    schedule: str = "1f1b"
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "tp", "pp", "ep", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"layout {name}={getattr(self, name)}: every axis needs at least 1 rank")
        if self.schedule not in SCHEDULES:
            raise InvalidArgument(f"layout schedule={self.schedule!r}: choose one of {', '.join(SCHEDULES)}")

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that share the experts of a layer."""
        return self.ep * self.tp

    @property
    def expert_shard(self) -> int:
        """The number of FSDP shards of each rank's experts."""
        return max(1, self.dp_shard // self.ep)

    @property
    def expert_replicate(self) -> int:
        return self.dp // (self.ep * self.expert_shard)

    def layers_of(self, stage: int, model: ModelConfig) -> range:
        """Return the layers of one stage, distributed as evenly as possible."""
        layers = model.num_hidden_layers
        return range(stage * layers // self.stages, (stage + 1) * layers // self.stages)

    def stages_of(self, pp_rank: int) -> list[int]:
        """Return the stages of one pipeline rank; interleaved stages are assigned round-robin."""
        return list(range(pp_rank, self.stages, self.pp))

    def takes(self, micro_batches: int) -> bool:
        """Return True if the pipeline's schedule supports this number of micro batches per rank.

        Without a pipeline any number works. torch's interleaved schedule needs equal rounds of about
        `pp` micro batches.
        """
        if self.pp == 1:
            return True
        if self.schedule == "interleaved":
            return micro_batches % max(1, micro_batches // self.pp) == 0
        return micro_batches >= self.stages

    def check(self, world: int, model: ModelConfig, sequence: int | None = None) -> None:
        """Raise InvalidArgument for an invalid layout, with the nearest valid layouts.

        `sequence` is the sequence length to train on, if known.
        """
        problems = list(self._problems(world, model, sequence))
        if problems:
            nearest = nearest_layouts(self, world, model, sequence)
            hint = "none for this model" if not nearest else "; ".join(map(str, nearest))
            raise InvalidArgument(
                f"layout {self} is invalid: {'; '.join(problems)}. Nearest valid for {world} ranks: {hint}"
            )

    def _problems(self, world: int, model: ModelConfig, sequence: int | None) -> Iterator[str]:
        if self.world != world:
            yield (
                f"it needs {self.world} ranks (pp x dp_replicate x dp_shard x tp), but there are {world} "
                "(set by --nproc, or torchrun's --nproc-per-node)"
            )
        if sequence is not None and sequence % self.tp:
            yield f"sequences of {sequence} tokens are not divisible by tp={self.tp}"
        yield from self._tensor_problems(model)
        yield from self._expert_problems(model)
        if model.num_hidden_layers < self.stages:
            yield f"{model.num_hidden_layers} layers are too few for {self.stages} stages (pp x stages_per_rank)"
        if self.schedule == "1f1b" and self.stages_per_rank != 1:
            yield f"schedule 1f1b supports 1 stage per rank, not {self.stages_per_rank}; interleaved supports several"
        if self.schedule == "interleaved" and (self.stages_per_rank == 1 or self.pp == 1):
            yield "schedule interleaved needs pp of 2 or more and stages_per_rank of 2 or more"
        if self.zero1 and (self.dp_shard, self.tp, self.ep) != (1, 1, 1):
            yield "zero1 supports only dp_replicate and pp; dp_shard already shards the optimizer's state"

    def _tensor_problems(self, model: ModelConfig) -> Iterator[str]:
        sizes = {
            "attention heads": model.num_attention_heads,
            "key-value heads": model.num_key_value_heads,
            "tokens of the vocabulary": model.vocab_size,
            "hidden units of the feed-forward": 0 if model.traits.experts else model.intermediate_size,
            "hidden units of the shared expert": model.shared_expert_intermediate_size,
        }
        for what, size in sizes.items():
            if size % self.tp:
                yield f"{size} {what} are not divisible by tp={self.tp}"

    def _expert_problems(self, model: ModelConfig) -> Iterator[str]:
        if not model.traits.experts:
            if self.ep > 1:
                yield f"ep={self.ep}, but a {model.family} has no experts"
            return
        if self.dp % self.ep:
            yield f"ep={self.ep} does not divide the {self.dp} data-parallel ranks"
        elif max(self.ep, self.dp_shard) % min(self.ep, self.dp_shard):
            yield f"of ep={self.ep} and dp_shard={self.dp_shard}, one must be a multiple of the other"
        if model.num_experts % self.expert_ranks:
            yield f"{model.num_experts} experts are not divisible by {self.expert_ranks} ranks (ep x tp)"

    def __str__(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in ("dp_replicate", "dp_shard", "tp", "pp", "ep")]
        if self.stages_per_rank > 1:
            shown.append(f"stages_per_rank={self.stages_per_rank}")
        if self.schedule != SCHEDULES[0]:
            shown.append(f"schedule={self.schedule}")
        if self.zero1:
            shown.append("zero1")
        return " ".join([part for part in shown if not part.endswith("=1")] or ["one rank"])


def nearest_layouts(wanted: Layout, world: int, model: ModelConfig, sequence: int | None = None) -> list[Layout]:
    """Return up to three valid layouts, those closest to the wanted layout first."""
    valid = [layout for layout in _candidates(wanted, world) if not list(layout._problems(world, model, sequence))]
    return sorted(valid, key=lambda layout: _preference(wanted, layout))[:_SUGGESTED]


def _candidates(wanted: Layout, world: int) -> Iterator[Layout]:
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    for pp, tp, dp_shard in itertools.product(divisors, repeat=3):
        dp_replicate, rest = divmod(world, pp * tp * dp_shard)
        if rest:
            continue
        for ep in (size for size in divisors if dp_replicate * dp_shard % size == 0):
            for zero1, stages in {(False, 1), (wanted.zero1, 1), (False, wanted.stages_per_rank)}:
                schedule = "interleaved" if stages > 1 else "1f1b"
                sizes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, "pp": pp, "ep": ep}
                yield replace(wanted, **sizes, zero1=zero1, stages_per_rank=stages, schedule=schedule)


def _preference(wanted: Layout, layout: Layout) -> tuple[float, ...]:
    """Return the sort key: the distance from the wanted layout, then preference for sharded data parallelism."""
    axes = ("dp_replicate", "dp_shard", "tp", "pp", "ep", "stages_per_rank")
    changes = sum(abs(math.log2(getattr(layout, name) / getattr(wanted, name))) for name in axes)
    distance = changes + (layout.zero1 != wanted.zero1)
    return (round(distance, 6), layout.dp_replicate, layout.tp, layout.pp, layout.ep, layout.dp_shard)
