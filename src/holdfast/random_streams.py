"""`RandomStreams`, the random numbers of a process as a state: Python, numpy, torch on the CPU and on every device."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from holdfast.core.errors import Mismatch
from holdfast.layout.coordinates import CoordinateChange

_KINDS = ("python", "numpy", "torch", "devices")
_SHOWN = 4  # coordinates that a note names


class RandomStreams:
    """The global random streams of a process: `random`, `numpy.random`, torch's CPU and all its devices.

    Add it to the state. Streams that differ between ranks are stored by their coordinates in the mesh, and a
    restore on the same mesh goes on exactly. On another mesh a rank takes the streams of its coordinates; where
    none were saved it gets new ones, which depend on the saved streams and its coordinates only. The report
    notes it.

    Streams that one process saved say nothing about ranks. Several ranks that load them follow the program: ranks
    whose streams are equal before the load have equal ones after it, those of rank 0 the saved ones. Seed them as
    you do for a run that starts anew.

    With `late=True` a load only keeps what it read, and `apply()` sets the streams: for programs that draw
    numbers between the load and the first step, as an iterator of a shuffling loader does.
    """

    def __init__(self, *, late: bool = False) -> None:
        self.late = late
        self.reshard_note = ""  # for the report of a load on another mesh
        self._loaded: Mapping[str, Any] | None = None

    @property
    def is_waiting(self) -> bool:
        """True if streams were loaded and `apply()` has not set them yet."""
        return self._loaded is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the streams as they are now, or those that were loaded and wait for `apply()`.

        Streams that wait are those of this rank already: a load gave them to its place in the present mesh.
        """
        if self._loaded is not None:
            return {**self._loaded, "world": _world()}
        return {
            "world": _world(),
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "devices": {str(device): _device_module(device).get_rng_state(device) for device in _devices()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the streams, or keep them until `apply()`."""
        unknown = sorted({"world", *_KINDS} ^ set(state))
        if unknown:
            raise Mismatch(f"random streams: {', '.join(unknown)}: not a state that RandomStreams saved")
        self._loaded = state
        if state["world"] != _world() and not self.reshard_note:  # every live rank has the place of a saved one
            self._note(state["world"], "every rank goes on with streams that were saved, and none are left out")
        if not self.late:
            self.apply()

    def _note(self, saved: int, effect: str) -> None:
        """Describe what a load on another mesh does, and what it means for the run."""
        live = _world()
        where = f"on another mesh of {live} ranks" if saved == live else f"with a world size of {saved}"
        change = "" if saved == live else f", loaded with {live}"
        self.reshard_note = (
            f"saved {where}{change}: {effect}. From here on random draws (dropout, augmentation) differ from those of "
            "a run that stays on the mesh that saved; nothing else is affected"
        )

    def apply(self) -> None:
        """Set the streams that were loaded; does nothing without a load."""
        if self._loaded is None:
            return
        state, self._loaded = self._loaded, None
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        for name, stream in state["devices"].items():
            device = torch.device(name)
            if _has_device(device):
                _device_module(device).set_rng_state(stream, device)

    def holdfast_live_parts(self, live: Mapping[str, Any]) -> dict[str, str]:
        """Return a digest of each kind of stream in a state of this rank."""
        return {kind: _digest_of(live[kind]) for kind in _KINDS}

    def holdfast_follow_live(
        self, state: Mapping[str, Any], leaders: Mapping[str, Sequence[int]], rank: int
    ) -> Mapping[str, Any]:
        """Return the streams of a rank, of those that all ranks share in a checkpoint."""
        if state.get("world") != 1 or _world() == 1:
            return state
        kinds = [kind for kind in _KINDS if any(leaders[kind])]
        if not kinds:
            self._note(
                1, "all ranks go on with the same streams, those that were saved, as the program seeds all alike"
            )
            return state
        self._note(
            1,
            "rank 0 goes on with the streams that were saved, and others begin with new ones, derived from those, of "
            f"{', '.join(kinds)}, as the program seeds ranks differently",
        )
        new = [kind for kind in kinds if leaders[kind][rank]]
        return {**state, **{kind: _derived(state, (leaders[kind][rank],))[kind] for kind in new}}

    def holdfast_reshard_at(
        self, states: Mapping[tuple[int, ...], Any], coordinate: tuple[int, ...], change: CoordinateChange
    ) -> Any:
        """Return the streams at a coordinate of another mesh than the one that saved."""
        effects = ["each rank goes on with the streams of its place"] if len(change.left) < len(states) else []
        if change.left:
            effects.append(f"no rank goes on with those of {_listed(change.left)}")
        if change.new:
            effects.append(
                f"{_listed(change.new)} had none and begin with new ones, derived from those that were saved"
            )
        self._note(states[min(states)]["world"], "; ".join(effects))
        return states[coordinate] if coordinate in states else _derived(states[min(states)], coordinate)


def _digest_of(stream: Any) -> str:
    parts = stream.items() if isinstance(stream, Mapping) else [("", stream)]
    plain = [(name, value.tolist() if isinstance(value, torch.Tensor) else value) for name, value in parts]
    with np.printoptions(threshold=sys.maxsize):
        return hashlib.blake2b(repr(plain).encode(), digest_size=16).hexdigest()


def _listed(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    return ", ".join(labels[:_SHOWN]) + more


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _derived(state: Mapping[str, Any], coordinate: tuple[int, ...]) -> dict[str, Any]:
    """Return new streams that depend on a saved state and the coordinate only."""
    text = repr((state["python"], state["torch"].tolist(), coordinate)).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    drawn = np.random.RandomState(seed % 2**32)
    return {
        "world": state["world"],
        "python": random.Random(seed).getstate(),  # noqa: S311  (not for secrets)
        "numpy": drawn.get_state(legacy=False),
        "torch": torch.Generator().manual_seed(seed % 2**63).get_state(),
        "devices": {
            name: torch.Generator(name).manual_seed(seed % 2**63).get_state()
            for name in state["devices"]
            if _has_device(torch.device(name))
        },
    }


def _devices() -> Iterator[torch.device]:
    """Yield the devices that this process uses: to ask others would start their driver."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return
    module = _device_module(kind)
    if getattr(module, "is_initialized", lambda: False)() and hasattr(module, "get_rng_state"):
        yield from (torch.device(kind.type, index) for index in range(module.device_count()))


def _has_device(device: torch.device) -> bool:
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type != device.type:
        return False
    return (device.index or 0) < int(_device_module(device).device_count())


def _device_module(device: torch.device) -> Any:
    return sys.modules.get(f"torch.{device.type}") or torch.get_device_module(device)
