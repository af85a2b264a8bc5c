"""Errors of collectives that some rank did not join: a note names the call that every rank has to make.

With the rules, calls such as `.item()` of a Partial are collectives. If only one rank makes such a call, its collective
times out, and the backend's error names neither the call nor the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

PREFIX = "holdfast.spmd:"
# Texts of gloo's errors, which are plain RuntimeErrors; other backends raise DistError.
GLOO = ("gloo", "Timed out waiting", "timeout caused pair closure", "Connection closed by", "Connection reset by")
PYTHON_FORMS = {
    "_local_scalar_dense": "item(), float(), int(), bool(), or a format such as f'{x:.3f}'",
    "index": "x[indices] or x[mask]",
    "index_put_": "x[indices] = v or x[mask] = v",
    "_index_put_impl_": "x[indices] = v or x[mask] = v",
    "slice": "x[a:b]",
    "select": "x[i]",
    "unbind": "unbind(), or a loop over the rows",
}
LISTED_RANKS = 16  # the ranks of a larger mesh are counted, not listed


def is_collective_error(error: BaseException) -> bool:
    """Return True for an error by which a backend reports a timeout or a lost rank."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in GLOO)


@contextmanager
def naming(call: str, tensor: DTensor) -> Iterator[None]:
    """Name a method that communicates in the errors of its collectives."""
    try:
        yield
    except RuntimeError as error:
        add_note(error, call, [tensor])
        raise


def name_operator(error: RuntimeError, op: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Name an operator in an error of one of its collectives; leave other errors unchanged."""
    packet = op._schema.name.partition("::")[2]
    add_note(error, f"{op} ({PYTHON_FORMS[packet]})" if packet in PYTHON_FORMS else str(op), tensors)


def add_note(error: RuntimeError, call: str, tensors: Iterable[torch.Tensor]) -> None:
    """Add the note to an error of a collective; the outermost call, which the user made, replaces inner ones."""
    if not is_collective_error(error):
        return
    placed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not placed:
        return
    error.__notes__ = [note for note in getattr(error, "__notes__", ()) if not note.startswith(PREFIX)]
    inputs = "; ".join(f"{list(tensor.shape)} as {', '.join(map(str, tensor.placements))}" for tensor in placed)
    mesh = placed[0].device_mesh
    ranks = mesh.mesh.flatten().tolist()
    which = f"{ranks}" if len(ranks) <= LISTED_RANKS else f"of {len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"
    error.add_note(
        f"{PREFIX} {call} of a DTensor ({inputs}) is a collective: every rank of the mesh {which} has to make this "
        f"call. Rank {mesh.get_rank()} made it; another rank did not, or has ended. To read a value on one rank, take "
        "it on every rank first, with full_tensor() or item(), and use it on that one (docs/spmd.md, Calls that every "
        "rank has to make)."
    )
