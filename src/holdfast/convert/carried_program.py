"""The program of a source in a conversion: carried along where it fits the new weights, else left out with a note."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Mismatch, Unsupported
from holdfast.core.names import PROGRAM, PROGRAM_GROUP
from holdfast.engine.program_save import StoredWeights, missing_weights, stored_program
from holdfast.plan.contents import Contents
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.program.graph import CONSTANT
from holdfast.program.model_program import Program

_AGAIN = "export it again from the converted model, and add it with holdfast.add_program"


@dataclass(frozen=True, slots=True)
class CarriedProgram:
    """The contents to write with the program's constants or without, its file, and why it was left out, if it was."""

    contents: Contents
    files: dict[str, bytes]
    notes: tuple[str, ...] = ()


def carry_program(source: Checkpoint, written: Contents, form: str) -> CarriedProgram:
    """Return what a conversion writes of the source's program. `written` are the contents without it.

    Keys follow the mapping. A weight that is split, transposed, cast or left out has no counterpart, so that the
    program is left out.
    """
    try:
        program = source.program
    except Unsupported as error:  # of a newer version
        return _left_out(written, f"it cannot be read: {error}")
    if program is None:
        return CarriedProgram(written, {})
    if form != "holdfast":
        return _left_out(written, f"the format {form} has no place for it", "")
    try:
        fitting = _fitting(program, source.contents, written)
    except Mismatch as error:
        return _left_out(written, str(error))
    groups = dict(written.groups)
    constants = source.contents.groups.get(PROGRAM_GROUP)
    groups.pop(PROGRAM_GROUP, None)
    if constants is not None and any(entry.kind == CONSTANT for entry in program.state):
        groups[PROGRAM_GROUP] = constants
    return CarriedProgram(replace(written, groups=groups), {PROGRAM: fitting.to_json()})


def _left_out(written: Contents, reason: str, remedy: str = f"; {_AGAIN}") -> CarriedProgram:
    groups = {name: group for name, group in written.groups.items() if name != PROGRAM_GROUP}
    return CarriedProgram(replace(written, groups=groups), {}, (f"the program is left out: {reason}{remedy}",))


def _fitting(program: Program, before: Contents, after: Contents) -> Program:
    """Return the program with the new keys; raises Mismatch if a weight is not one of the new ones as it was."""
    group = program.group
    old = before.groups[group].tensors if group in before.groups else {}
    renamed: dict[str, str | None] = dict.fromkeys(old)
    for key, recipe in after.groups[group].tensors.items() if group in after.groups else ():
        source = _whole_source(recipe)
        if source in renamed and renamed[source] is None:
            renamed[source] = key
    if group in before.groups:
        renamed |= {alias: renamed[key] for alias, key in before.groups[group].aliases.items()}
    if program.mapping:
        if any(renamed[key] != key for key in old):
            raise Mismatch("its weights are stored in other shapes, and the conversion changes them")
        return program
    shapes = {key: after.find(group, key) for key in after.groups[group].tensors} if group in after.groups else {}
    logical = {key: tensor.logical_shape for key, tensor in shapes.items() if tensor is not None}
    aliases = after.groups[group].aliases if group in after.groups else {}
    weights = StoredWeights(group, logical, aliases, renamed)
    if missing := missing_weights(program, weights):
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise Mismatch(f"the conversion changes or leaves out its weights {', '.join(missing[:5])}{more}")
    return stored_program(program, weights)


def _whole_source(recipe: Recipe[Place]) -> str | None:
    """Return the key of the tensor that a recipe copies unchanged, None for another recipe."""
    if len(recipe.terms) != 1:
        return None
    spec = recipe.terms[0].source.spec
    return spec.key if recipe.is_whole(spec.shape) and recipe.dtype.name == spec.dtype.name else None
