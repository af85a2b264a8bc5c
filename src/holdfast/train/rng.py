"""Random streams by purpose and mesh coordinate: saved per coordinate, derived again if the mesh changes."""

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

SHARED = "shared"  # for activations replicated over a tensor group
DISTINCT = "distinct"  # for activations sharded over a tensor group
EXPERT = "expert"  # within experts: their number of draws depends on routing and must not affect other streams
# Axes along which all ranks draw the same numbers, by purpose.
_SAME_ALONG: dict[str, frozenset[str]] = {
    SHARED: frozenset({"tp"}),
    DISTINCT: frozenset(),
    EXPERT: frozenset(),
}
PURPOSES = tuple(_SAME_ALONG)


@dataclass(frozen=True, slots=True)
class MeshPosition:
    """A rank's coordinate on the mesh, with the size of each axis."""

    sizes: Mapping[str, int]
    place: Mapping[str, int]

    def fields(self) -> dict[str, Any]:
        """Return the JSON form, without axes of size 1."""
        axes = [axis for axis, size in self.sizes.items() if size > 1]
        return {axis: [self.place[axis], self.sizes[axis]] for axis in axes}


def derive_seed(seed: int, step: int, purpose: str, position: MeshPosition) -> int:
    """Return the seed of a stream that begins at `step`."""
    axes = sorted(axis for axis, size in position.sizes.items() if size > 1 and axis not in _SAME_ALONG[purpose])
    text = f"{seed}/{step}/{purpose}/" + ",".join(f"{axis}={position.place[axis]}" for axis in axes)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class PurposeStreams:
    """One random stream per purpose. Within `use(purpose)`, torch's generator uses that stream.

    Intended for user modules: the trainer's dropout uses no stream (see models/dropout.py). The trainer's
    forward passes run within `use(DISTINCT)`; another purpose may be used inside. Recomputing a block
    restores the outer stream, but not a stream used inside.

    Add it to the state: each rank's streams are saved by mesh coordinate. On the same mesh they continue
    bit for bit. On another mesh they are derived again from (seed, step, coordinate), and `derived` says
    so. The loop must keep `step` up to date.
    """

    def __init__(self, seed: int, position: MeshPosition, device: torch.device | str = "cpu") -> None:
        self.step = 0
        self.derived = ""
        self._seed = seed
        self._mesh_position = position
        self._device = torch.device(device)
        self._states: dict[str, torch.Tensor] = {}
        self._derive()

    def _derive(self) -> None:
        for purpose in PURPOSES:
            generator = torch.Generator(self._device)
            generator.manual_seed(derive_seed(self._seed, self.step, purpose, self._mesh_position))
            self._states[purpose] = generator.get_state()

    @contextmanager
    def use(self, purpose: str) -> Iterator[None]:
        """Use this stream as torch's generator of the device within the context."""
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
        position = self._mesh_position.fields()
        return {
            "seed": self._seed,
            "step": self.step,
            "spot": position,
            "device": self._device.type,
            "streams": streams,
        }

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
        mine, saved = self._mesh_position.fields(), state["spot"]
        if state["seed"] != self._seed:
            return f"random streams derived again: saved with seed {state['seed']}, but the run has seed {self._seed}"
        if saved == mine and state["device"] == self._device.type:
            return ""
        meshes = [
            ", ".join(f"{axis}={size}" for axis, (_, size) in fields.items()) or "one rank" for fields in (saved, mine)
        ]
        return (
            f"random streams derived again from (seed, step {self.step}, mesh coordinate): they were saved on "
            f"{meshes[0]} ({state['device']}), but the run is now on {meshes[1]} ({self._device.type})"
        )

    def holdfast_reshard(self, states: Mapping[tuple[int, ...], Any], rank: int, world: int) -> Any:
        """Return the state of any coordinate: it only provides the step to derive from."""
        return states[min(states)]
