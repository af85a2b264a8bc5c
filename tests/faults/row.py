"""A row of the fault table: one fault, injected many times, and what became of the checkpoints.

The rule for all: after a fault every acknowledged checkpoint loads and verifies (else it is
`lost`), no uncommitted one is taken for a checkpoint and no wrong byte loads without an error
(else it is `wrong`), and no call runs past its deadline (else it is `hung`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tally:
    """How many faults were injected, and what each one came to; tallies add up."""

    injected: int = 0
    survived: int = 0
    lost: int = 0
    wrong: int = 0
    hung: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.injected + other.injected,
            self.survived + other.survived,
            self.lost + other.lost,
            self.wrong + other.wrong,
            self.hung + other.hung,
        )

    @property
    def good(self) -> bool:
        """Whether something was tried, and all of it survived."""
        return self.injected > 0 and self.survived == self.injected and not self.lost + self.wrong + self.hung


SURVIVED = Tally(injected=1, survived=1)
LOST = Tally(injected=1, lost=1)
WRONG = Tally(injected=1, wrong=1)
HUNG = Tally(injected=1, hung=1)


@dataclass(frozen=True, slots=True)
class Row:
    """One fault of the table.

    `run` takes a seed and injects all of it; the same seed does the same. What went wrong it
    says on standard error, with what is needed to see it again. `counted` is False for what
    is cheap to have by the thousand: bit flips, truncations, layouts, states of a power loss.
    """

    fault: str
    run: Callable[[int], Tally]
    counted: bool = True
