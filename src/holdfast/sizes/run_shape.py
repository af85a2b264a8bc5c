"""The shape of a training run: the ranks of each kind of parallelism and the ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """Ranks are numbered with pipeline stages outermost and tensor parallelism innermost.

    Expert parallelism uses no additional ranks: the experts of a layer are dealt to `ep` data-parallel ranks and
    all ranks of their tensor groups. ZeRO shards over the data-parallel ranks: the optimizer's state from stage 1,
    gradients from stage 2, parameters in stage 3.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "ep", "ranks_per_host"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}={getattr(self, name)}: every axis needs at least 1 rank")
        if self.zero not in (0, 1, 2, 3):
            raise InvalidArgument(f"zero={self.zero}: choose 0, 1, 2 or 3")
        if self.dp % self.ep:
            raise InvalidArgument(f"ep={self.ep} does not divide the {self.dp} data-parallel ranks")

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of every rank."""
        return tuple(rank // self.ranks_per_host for rank in range(self.world))

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that share the experts of a layer."""
        return self.ep * self.tp

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of a pipeline stage, data-parallel ranks outermost."""
        size = self.dp * self.tp
        return tuple(range(stage * size, (stage + 1) * size))

    def expert_copies(self, stage: int, owner: int) -> tuple[int, ...]:
        """Return the ranks of a stage that hold the experts of one of the `expert_ranks`."""
        group, tensor = divmod(owner, self.tp)
        ranks = self.stage_ranks(stage)
        return tuple(ranks[(copy * self.ep + group) * self.tp + tensor] for copy in range(self.dp // self.ep))

    def __str__(self) -> str:
        return f"dp {self.dp} x tp {self.tp} x pp {self.pp}, ep {self.ep}, zero {self.zero}"
