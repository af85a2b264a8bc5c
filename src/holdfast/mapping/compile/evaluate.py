"""One step as algebra on recipes: turned, combined, permuted, reshaped, cast, parted, turned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.mapping.compile.fused import Unfit, check_part_sizes, fuse, part_sizes, segment_count, segments_of, unfuse
from holdfast.mapping.compile.lookahead import Foresight
from holdfast.mapping.compile.reshape import Unreshapable, pieces, reshaped
from holdfast.mapping.expand.expand import Work
from holdfast.mapping.expand.expansion import Step
from holdfast.mapping.syntax.statement import UNKNOWN, Options, Statement
from holdfast.plan.recipe import Recipe

Recipes = list[Recipe[str]]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a step may ask for beside its sources: TP degrees, what becomes of its results, work."""

    source_tp: int | None
    target_tp: Callable[[str], int | None]
    foresight: Foresight
    work: Work


def evaluate(statement: Statement, number: int, step: Step, sources: Recipes, around: Surroundings) -> Recipes:
    """The recipes of the step's right names. `number` is the statement's place in the program."""
    _check_source_dtypes(statement, step, sources)
    made = [recipe.transposed() if turn else recipe for recipe, turn in zip(sources, step.left_turned, strict=True)]
    if statement.options.fused is not None:
        made = _fused(statement, number, step, made, around)
    elif statement.stacks:
        made = [_stack(statement, step, made)]
    elif len(made) > 1 or (len(step.rights) == 1 and isinstance(statement.options.sizes, tuple)):
        made = [_concat(statement, step, made)]
    made = [_permute(statement, step, recipe) for recipe in made]
    if statement.options.reshape is not None:
        made = [_reshape(statement, number, step, made[0], around)]
    made = [_cast(statement, recipe) for recipe in made]
    if statement.unstacks:
        made = _unstack(statement, step, made[0])
    elif len(made) == 1 and len(step.rights) > 1:
        made = _split(statement, number, step, made[0], around)
    return [recipe.transposed() if turn else recipe for recipe, turn in zip(made, step.right_turned, strict=True)]


def shown(names: Sequence[str], recipes: Recipes) -> str:
    """Keys with their shapes, as errors show them."""
    known = [f"{name!r} {list(recipe.shape)}" for name, recipe in zip(names, recipes, strict=True)]
    return ", ".join(known[:6]) + (f" and {len(known) - 6} more" if len(known) > 6 else "")


def dim_of(statement: Statement, rank: int, default: int | None = None) -> int:
    """The dim that `axis=` means for tensors of this rank."""
    axis = statement.options.axis if statement.options.axis is not None else default
    if axis is None or not -rank <= axis < rank:
        raise statement.refusal(f"axis={axis}: a tensor of {rank} dims has the axes {-rank} to {rank - 1}")
    return axis % rank


def _check_source_dtypes(statement: Statement, step: Step, sources: Recipes) -> None:
    wanted = statement.options.src_dtype
    for name, recipe in zip(step.lefts, sources, strict=True):
        if wanted is not None and recipe.dtype is not wanted and recipe.dtype is not UNKNOWN:
            raise statement.refusal(f"{name!r} is {recipe.dtype.name}, not the {wanted.name} that src_dtype= says")


def _check_alike(statement: Statement, step: Step, parts: Recipes, dim: int | None) -> None:
    """Parts that are joined differ in one dim only, and those that are stacked in none."""
    first = parts[0]
    for part in parts[1:]:
        alike = len(part.shape) == len(first.shape) and all(
            a == b for d, (a, b) in enumerate(zip(part.shape, first.shape, strict=True)) if d != dim
        )
        if not alike:
            rule = (
                "stacked must be equal" if dim is None else f"joined along axis {dim} must be equal in all other dims"
            )
            raise statement.refusal(f"parts that are {rule}: {shown(step.lefts, parts)}")
        if part.dtype is not first.dtype and UNKNOWN not in (part.dtype, first.dtype):
            raise statement.refusal(
                f"parts that are joined must have one dtype, not {first.dtype.name} and {part.dtype.name}: "
                f"{shown(step.lefts, parts)}; cast them first"
            )


def _concat(statement: Statement, step: Step, parts: Recipes) -> Recipe[str]:
    dim = dim_of(statement, len(parts[0].shape))
    _check_alike(statement, step, parts, dim)
    sizes = statement.options.sizes
    found = tuple(part.shape[dim] for part in parts)
    if sizes == "equal":
        sizes = found[:1] * len(found)
    if isinstance(sizes, tuple) and sizes != found:
        raise statement.refusal(f"sizes={list(sizes)}, but the parts have {list(found)}: {shown(step.lefts, parts)}")
    return Recipe.concat(parts, dim)


def _stack(statement: Statement, step: Step, parts: Recipes) -> Recipe[str]:
    dim = dim_of(statement, len(parts[0].shape) + 1)
    _check_alike(statement, step, parts, None)
    return Recipe.concat([part.unsqueezed(dim) for part in parts], dim)


def _unstack(statement: Statement, step: Step, whole: Recipe[str]) -> Recipes:
    dim = dim_of(statement, len(whole.shape))
    if whole.shape[dim] != len(step.rights):
        raise statement.refusal(
            f"{step.lefts[0]!r} {list(whole.shape)} has {whole.shape[dim]} slices along axis {dim}, but there are "
            f"{len(step.rights)} keys for them: {', '.join(map(repr, step.rights[:6]))}"
        )
    return [part.squeezed(dim) for part in whole.split(dim, (1,) * len(step.rights))]


def _permute(statement: Statement, step: Step, recipe: Recipe[str]) -> Recipe[str]:
    order = statement.options.permute
    if order is None:
        return recipe
    if not order:
        return recipe.transposed()
    if len(order) != len(recipe.shape):
        raise statement.refusal(
            f"permute={list(order)} is an order of {len(order)} dims, but there are {len(recipe.shape)}: "
            f"{step.lefts[0]!r} {list(recipe.shape)}"
        )
    return recipe.permuted(order)


def _reshape(statement: Statement, number: int, step: Step, recipe: Recipe[str], around: Surroundings) -> Recipe[str]:
    """The tensor in the shape of `reshape=`, or in the target's where it has that of `reshape=` already.

    AOA names the longer of two shapes, and goes from either to the other.
    """
    options = statement.options
    wanted, known = options.reshape, around.foresight.whole(number, step)
    if options.src_shape is not None and recipe.shape != options.src_shape:
        raise statement.refusal(
            f"what is reshaped has the shape {list(recipe.shape)}, not the {list(options.src_shape)} that "
            "src_shape= says"
        )
    if wanted == "targets" and known is None:
        raise statement.refusal(
            f"the shape of {', '.join(map(repr, step.rights[:6]))} is not known; give reshape=[...], or make the "
            "mapping with reverse(shapes) from the shapes of its sources"
        )
    if known is not None and wanted in ("targets", recipe.shape):
        wanted = known
    assert isinstance(wanted, tuple)
    try:
        around.work.spend(pieces(recipe.shape, wanted) * len(recipe.terms), statement)
        return reshaped(recipe, wanted)
    except Unreshapable as problem:
        what = f"{step.lefts[0]!r} {list(recipe.shape)} cannot have the shape {list(wanted)}"
        raise statement.refusal(f"{what}: {problem}") from None


def _cast(statement: Statement, recipe: Recipe[str]) -> Recipe[str]:
    dtype = statement.options.cast
    if dtype is None:
        return recipe
    if recipe.dtype.name != recipe.dtype.stored:
        raise statement.refusal(f"{recipe.dtype.name} cannot be cast")
    return recipe.cast(dtype)


def _split(statement: Statement, number: int, step: Step, whole: Recipe[str], around: Surroundings) -> Recipes:
    dim = dim_of(statement, len(whole.shape))
    return whole.split(dim, _split_sizes(statement, number, step, whole.shape, dim, around))


def _split_sizes(
    statement: Statement, number: int, step: Step, shape: tuple[int, ...], dim: int, around: Surroundings
) -> tuple[int, ...]:
    count, size = len(step.rights), shape[dim]
    what = f"{step.lefts[0]!r} {list(shape)} along axis {dim}"
    wanted = statement.options.sizes
    if wanted == "targets":
        wanted = _sizes_of_targets(statement, number, step, size, dim, around)
    if not isinstance(wanted, tuple):
        if size % count:
            raise statement.refusal(f"{what} is not {count} equal parts; give sizes=[...]")
        return (size // count,) * count
    if len(wanted) != count:
        raise statement.refusal(f"{len(wanted)} sizes for {count} parts: {', '.join(map(repr, step.rights[:6]))}")
    if sum(wanted) != size or min(wanted) < 0:
        raise statement.refusal(f"sizes={list(wanted)} come to {sum(wanted)}, but {what} has {size}")
    return wanted


def _sizes_of_targets(
    statement: Statement, number: int, step: Step, size: int, dim: int, around: Surroundings
) -> tuple[int, ...]:
    sizes: list[int | None] = []
    for name, turned in zip(step.rights, step.right_turned, strict=True):
        shape = around.foresight.shape(number, name)
        if shape is not None and dim < len(shape):
            sizes.append(shape[::-1][dim] if turned else shape[dim])
        else:
            sizes.append(None)
    unknown = [name for name, found in zip(step.rights, sizes, strict=True) if found is None]
    if len(unknown) == len(sizes) and statement.aoa and not size % len(sizes):
        return (size // len(sizes),) * len(sizes)  # AOA has no other cuts than even ones
    if len(unknown) > 1:
        raise statement.refusal(
            f"the sizes of {', '.join(map(repr, unknown[:6]))} are not known; give sizes=[...], or make the mapping "
            "with reverse(shapes) from the shapes of its sources"
        )
    rest = size - sum(found for found in sizes if found is not None)
    return tuple(rest if found is None else found for found in sizes)


def _fused(statement: Statement, number: int, step: Step, made: Recipes, around: Surroundings) -> Recipes:
    dim = dim_of(statement, len(made[0].shape), default=1)
    try:
        if len(made) > 1:
            _check_alike(statement, step, made, dim)
            return [_fuse(statement, made, dim, _target_degree(statement, number, step, around), around.work)]
        options = statement.options
        degree = _source_degree(statement, len(step.rights), around)
        sizes = _sizes_of_heads(statement, number, step, made[0].shape, dim, degree, around)
        around.work.spend(segment_count(options, degree), statement)
        parts = unfuse(made[0], segments_of(options, sizes, degree, alike=False), dim)
        if len(step.rights) > 1:
            return parts
        return [_fuse(statement, parts, dim, _target_degree(statement, number, step, around), around.work)]
    except Unfit as problem:
        raise statement.refusal(f"{problem}: {shown(step.lefts, made)}, axis {dim}") from None


def _sizes_of_heads(
    statement: Statement,
    number: int,
    step: Step,
    shape: tuple[int, ...],
    dim: int,
    degree: int,
    around: Surroundings,
) -> tuple[int, ...]:
    """The sizes of what a fused weight is cut into: as given, as the targets have them, or heads of one size."""
    options = statement.options
    if options.fused == "fused_ffn" or len(step.rights) == 1:
        return part_sizes(options, shape[dim], degree)
    sizes = options.sizes if isinstance(options.sizes, tuple) else _target_sizes(number, step, dim, around)
    if sizes is None and options.sizes == "targets" and not statement.aoa:
        raise statement.refusal(
            f"the sizes of {', '.join(map(repr, step.rights))} are not known; give sizes=[q, k, v], or make the "
            "mapping with reverse(shapes) from the shapes of its sources"
        )
    if sizes is None or (options.sizes is None and len(set(_per_head(options, sizes))) == 1):
        return part_sizes(options, shape[dim], degree)
    check_part_sizes(options, sizes, shape[dim], degree)
    return sizes


def _per_head(options: Options, sizes: Sequence[int]) -> list[float]:
    counts = (options.num_heads, options.num_key_value_groups, options.num_key_value_groups)
    return [size / (count or 1) for size, count in zip(sizes, counts, strict=True)]


def _target_sizes(number: int, step: Step, dim: int, around: Surroundings) -> tuple[int, ...] | None:
    """The sizes of all right names along a dim, if they are known."""
    sizes = []
    for name, turned in zip(step.rights, step.right_turned, strict=True):
        shape = around.foresight.shape(number, name)
        if shape is None or dim >= len(shape):
            return None
        sizes.append(shape[::-1][dim] if turned else shape[dim])
    return tuple(sizes)


def _fuse(statement: Statement, parts: Recipes, dim: int, degree: int, work: Work) -> Recipe[str]:
    sizes = [part.shape[dim] for part in parts]
    work.spend(segment_count(statement.options, degree), statement)
    return fuse(parts, segments_of(statement.options, sizes, degree, alike=not statement.aoa), dim)


def _source_degree(statement: Statement, rights: int, around: Surroundings) -> int:
    options = statement.options
    given = options.src_tp_degree or (options.tp_degree if rights > 1 else None)
    return _known_degree(statement, given or around.source_tp, "source")


def _target_degree(statement: Statement, number: int, step: Step, around: Surroundings) -> int:
    options = statement.options
    given = options.dst_tp_degree or options.tp_degree
    if given is None and options.fused != "fused_qkv":
        given = _degree_of_goals(statement, number, step.rights[0], around)
    return _known_degree(statement, given or around.source_tp, "target")


def _degree_of_goals(statement: Statement, number: int, name: str, around: Surroundings) -> int | None:
    """The degree of the target, also where the statement makes a temporary on the way to it."""
    degrees = {goal: around.target_tp(goal) for goal in sorted(around.foresight.goals(number, name))}
    found = {degree for degree in degrees.values() if degree is not None}
    if len(found) > 1:
        told = ", ".join(f"{goal!r} {degree}" for goal, degree in degrees.items())
        raise statement.refusal(f"{name!r} goes into targets of several TP degrees: {told}; add tp_degree=")
    return next(iter(found), None)


def _known_degree(statement: Statement, degree: int | None, side: str) -> int:
    if statement.options.fused == "fused_qkv":
        return 1
    if degree is None:
        raise statement.refusal(
            f"the order in a {statement.options.fused} weight depends on the TP degree that it is for, and the "
            f"{side}'s is not known: add tp_degree=, or convert with --tp-degree"
        )
    return degree
