"""Random streams by purpose and by place in the mesh: saved where they are, derived anew where the mesh changed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import InvalidArgument, Mismatch

_LOG = logging.getLogger("holdfast")

SHARED = "shared"  # for activations that every rank of a tensor group has whole
DISTINCT = "distinct"  # for activations that a tensor group has cut between its ranks
EXPERT = "expert"  # within experts, whose number of draws follows the routing and must disturb no other stream
# What each purpose does not depend on: ranks along that axis draw the same numbers.
_SAME_ALONG: dict[str, frozenset[str]] = {
    SHARED: frozenset({"tp"}),
    DISTINCT: frozenset(),
    EXPERT: frozenset(),
}
PURPOSES = tuple(_SAME_ALONG)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a rank stands: the size of each axis of the mesh and the rank's place on it."""

    sizes: Mapping[str, int]
    place: Mapping[str, int]

    def fields(self) -> dict[str, Any]:
        """Axes of size 1 say nothing: a mesh with and without them is the same."""
        axes = [axis for axis, size in self.sizes.items() if size > 1]
        return {axis: [self.place[axis], self.sizes[axis]] for axis in axes}


def derive_seed(seed: int, step: int, purpose: str, spot: Spot) -> int:
    """The seed of a stream that begins at `step`, by all that it may depend on."""
    axes = sorted(axis for axis, size in spot.sizes.items() if size > 1 and axis not in _SAME_ALONG[purpose])
    text = f"{seed}/{step}/{purpose}/" + ",".join(f"{axis}={spot.place[axis]}" for axis in axes)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class RandomStreams:
    """One random stream per purpose. Within `use(purpose)`, torch's own generator draws from it.

    For modules of the user's own: the trainer's dropout draws from none (see models/dropout.py).
    The trainer's forward passes run within `use(DISTINCT)`; another purpose may be used inside.
    A block that is computed again finds the outer stream as it was, but one used inside has gone on.

    Put it into the state: every rank's streams are saved under its place in the mesh. On the
    same mesh they go on bit for bit; on another they are derived anew from (seed, step, place),
    and `derived` says so. `step` is to be kept up to date by the loop.
    """

    def __init__(self, seed: int, spot: Spot, device: torch.device | str = "cpu") -> None:
        self.step = 0
        self.derived = ""
        self._seed = seed
        self._spot = spot
        self._device = torch.device(device)
        self._states: dict[str, torch.Tensor] = {}
        self._derive()

    def _derive(self) -> None:
        for purpose in PURPOSES:
            generator = torch.Generator(self._device)
            generator.manual_seed(derive_seed(self._seed, self.step, purpose, self._spot))
            self._states[purpose] = generator.get_state()

    @contextmanager
    def use(self, purpose: str) -> Iterator[None]:
        """Within, whatever draws from torch's generator of the device draws from this stream."""
        if purpose not in self._states:
            raise InvalidArgument(f"there is no random stream {purpose!r}: choose one of {', '.join(PURPOSES)}")
        outer = self._current()
        self._set(self._states[purpose])
        try:
            yield
        finally:
            self._states[purpose] = self._current()
            self._set(outer)

    def _current(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)

    def state_dict(self) -> dict[str, Any]:
        streams = {purpose: state.clone() for purpose, state in self._states.items()}
        spot = self._spot.fields()
        return {"seed": self._seed, "step": self.step, "spot": spot, "device": self._device.type, "streams": streams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        self.derived = self._difference(state)
        if self.derived:
            _LOG.info("%s", self.derived)
            self._derive()
            return
        if state["streams"].keys() != self._states.keys():
            raise Mismatch(f"the checkpoint's random streams are {sorted(state['streams'])}, not {sorted(PURPOSES)}")
        self._states = {purpose: stream.clone() for purpose, stream in state["streams"].items()}

    def _difference(self, state: Mapping[str, Any]) -> str:
        mine, saved = self._spot.fields(), state["spot"]
        if state["seed"] != self._seed:
            return f"random streams derived anew: saved with seed {state['seed']}, the run has {self._seed}"
        if saved == mine and state["device"] == self._device.type:
            return ""
        told = [", ".join(f"{axis}={size}" for axis, (_, size) in spot.items()) or "one rank" for spot in (saved, mine)]
        return (
            f"random streams derived anew from (seed, step {self.step}, place in the mesh): they were saved on "
            f"{told[0]} ({state['device']}) and the run is on {told[1]} ({self._device.type}) now"
        )

    def holdfast_reshard(self, states: Mapping[tuple[int, ...], Any], rank: int, world: int) -> Any:
        """Any place's state will do: it is not this rank's own, and says at which step to derive."""
        return states[min(states)]
