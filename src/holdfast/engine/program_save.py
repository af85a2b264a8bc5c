"""The program of a save: its keys as they are stored, its files, encoded once for all saves of a layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument, Mismatch, Unsupported
from holdfast.core.names import PROGRAM, PROGRAM_GROUP, index_file
from holdfast.format.dtypes import dtype_named
from holdfast.format.safetensors import encode_index
from holdfast.plan.files import TensorSpec, split_group
from holdfast.plan.state_values import PROGRAM_PREFIX, RankValue, program_file
from holdfast.program.graph import CONSTANT, StateEntry
from holdfast.program.model_program import Program

if TYPE_CHECKING:
    from holdfast.adapters.saving.agreement import Agreement
    from holdfast.adapters.saving.stored_keys import StoredKeys

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights of one module as they are stored: shapes by key, and other keys of the same tensors.

    `renamed` maps keys in memory to stored ones, None for a tensor that is stored in other parts or shapes. `mapping`
    is the recorded mapping from names in memory to those in the files, "" if there is none.
    """

    group: str
    shapes: Shapes
    aliases: Mapping[str, str]
    renamed: Mapping[str, str | None]
    mapping: str = ""


class ProgramEncoder:
    """Encodes the program of a run for the writer; again only if the layout of the state changes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: tuple[object, dict[str, RankValue]] | None = None

    def values(self, agreement: Agreement, stored: StoredKeys | None) -> dict[str, RankValue]:
        """Return the files of the program as values of this rank; raises Mismatch if it is of another model."""
        if self._known is None or self._known[0] is not agreement:
            weights = _weights_of(self._program, agreement, stored)
            files = program_bytes(stored_program(self._program, weights))
            encoded = {PROGRAM_PREFIX + name: program_file(data) for name, data in files.items()}
            self._known = agreement, encoded
        return self._known[1]


def _weights_of(program: Program, agreement: Agreement, stored: StoredKeys | None) -> StoredWeights:
    """Return the stored weights of the module that the program is of."""
    if PROGRAM_GROUP in agreement.kinds:
        raise InvalidArgument(
            f"the state has an entry {PROGRAM_GROUP!r}: a program needs this name, so call it otherwise"
        )
    modules = [name for name, kind in agreement.kinds.items() if kind == "module"]
    found = []
    for group in sorted(modules, key=lambda name: name != program.group):
        shapes = {key: tensor.shape for (name, key), tensor in agreement.tensors.items() if name == group}
        renamed = {} if stored is None else _renamed(group, stored)
        mapping = "" if stored is None else stored.recorded.get(group, "")
        found.append(StoredWeights(group, shapes, agreement.aliases.get(group, {}), renamed, mapping))
    return require_weights(program, found)


def require_weights(program: Program, found: Sequence[StoredWeights]) -> StoredWeights:
    """Return the first module that has all weights of the program; raises Mismatch if none has."""
    fitting = [weights for weights in found if not missing_weights(program, weights)]
    if fitting:
        return fitting[0]
    if not found:
        raise Mismatch("the state has no module that the program could be of")
    missing = missing_weights(program, found[0])
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    raise Mismatch(
        f"the program is of another model than {found[0].group!r}: it has the weights {', '.join(missing[:5])}{more}, "
        f"which are not saved{_other_shape(program, found[0], missing[0])}; export it from the model that is saved, "
        "before the model is wrapped or sharded"
    )


def _other_shape(program: Program, weights: StoredWeights, key: str) -> str:
    """Return the part of an error for a weight that is saved in another shape, "" for one that is not saved."""
    entry = next(entry for entry in program.state if entry.key == key and entry.kind != CONSTANT)
    if key not in weights.shapes:
        return ""
    return f" in these shapes ({key} is {list(weights.shapes[key])}, and {list(entry.type.shape)} in the program)"


def _renamed(group: str, stored: StoredKeys) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for (module, key), uses in stored.uses.items():
        if module == group:
            whole = [new for _, new, recipe in uses if recipe.is_whole(recipe.terms[0].source.spec.shape)]
            found[key] = whole[0] if len(uses) == len(whole) == 1 else None
    return found


def _stored_key(entry: StateEntry, weights: StoredWeights) -> str | None:
    """Return the key that a weight is stored under; None if it is not stored as it is."""
    shape = tuple(int(size) for size in entry.type.shape if isinstance(size, int))
    for key in (entry.key, *entry.aliases):
        new = weights.renamed.get(key, key)
        new = weights.aliases.get(new, new) if new is not None else None
        if new is not None and weights.shapes.get(new) == shape:
            return new
    return None


def missing_weights(program: Program, weights: StoredWeights) -> list[str]:
    """Return the weights that are neither stored nor made into stored ones by the recorded mapping."""
    lost = [entry.key for entry in program.state if entry.kind != CONSTANT and _stored_key(entry, weights) is None]
    return [key for key in lost if not (weights.mapping and key in weights.renamed)]


def stored_program(program: Program, weights: StoredWeights) -> Program:
    """Return the program with the keys of the files; with those in memory and a mapping, where tensors change shape."""
    if any(entry.kind != CONSTANT and _stored_key(entry, weights) is None for entry in program.state):
        return replace(program, group=weights.group, mapping=weights.mapping)
    others: dict[str, list[str]] = {}
    for alias, key in weights.aliases.items():
        others.setdefault(key, []).append(alias)
    state = []
    for entry in program.state:
        own = None if entry.kind == CONSTANT else _stored_key(entry, weights)
        state.append(entry if own is None else replace(entry, key=own, aliases=tuple(others.get(own, ()))))
    return replace(program, state=tuple(state), group=weights.group)


def program_bytes(program: Program) -> dict[str, bytes]:
    """Return the files of a program by name: program.json, and the group of its constants if it has any."""
    files = {PROGRAM: program.check().to_json()}
    constants = {entry.key: entry for entry in program.state if entry.kind == CONSTANT}
    if not constants:
        return files
    missing = [key for key in constants if key not in program.constants]
    if missing:
        raise Mismatch(f"the program has no values of its constant {missing[0]!r}: it was read without its checkpoint")
    specs = [_spec(key, entry) for key, entry in constants.items()]
    total = sum(spec.bytes for spec in specs)
    if total > limits.PROGRAM_CONSTANTS_BYTES:
        most = limits.PROGRAM_CONSTANTS_BYTES // limits.MIB
        raise Unsupported(
            f"the constants of the program have {total} bytes, more than {most} MiB: make them persistent buffers"
        )
    (plan,) = split_group(PROGRAM_GROUP, specs, limits.PROGRAM_CONSTANTS_BYTES + 1)
    parts = [plan.header, *(_array_bytes(program.constants[place.spec.key]) for place in plan.places)]
    files[plan.name] = b"".join(parts)
    files[index_file(PROGRAM_GROUP)] = encode_index({spec.key: plan.name for spec in specs}, total)
    return files


def _spec(key: str, entry: StateEntry) -> TensorSpec:
    shape = tuple(int(size) for size in entry.type.shape if isinstance(size, int))
    return TensorSpec(key, dtype_named(entry.type.dtype), shape)


def _array_bytes(array: npt.NDArray[Any]) -> bytes:
    data = np.ascontiguousarray(array).tobytes()
    assert len(data) == math.prod(array.shape) * array.itemsize
    return data
