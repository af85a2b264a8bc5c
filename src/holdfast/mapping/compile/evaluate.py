"""Evaluate one step on recipes: transpose, concat, stack, unstack, permute, reshape, cast, split, fuse, unfuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.mapping.compile.fused import (
    FusionError,
    check_part_sizes,
    fuse,
    part_sizes,
    segment_count,
    segments_of,
    unfuse,
)
from holdfast.mapping.compile.lookahead import Lookahead
from holdfast.mapping.compile.reshape import ReshapeError, box_count, reshaped
from holdfast.mapping.expand.expand import WorkBudget
from holdfast.mapping.expand.expansion import ExpandedStep
from holdfast.mapping.syntax.statement import UNKNOWN, Options, Statement
from holdfast.plan.recipe import Recipe

Recipes = list[Recipe[str]]


@dataclass(frozen=True, slots=True)
class StepContext:
    """The context of a step: TP degrees, the later use of its results and the work budget."""

    source_tp: int | None
    target_tp: Callable[[str], int | None]
    lookahead: Lookahead
    work: WorkBudget


def evaluate(statement: Statement, number: int, step: ExpandedStep, sources: Recipes, context: StepContext) -> Recipes:
    """Return the recipes of the step's right names. `number` is the statement's position in the program."""
    _check_source_dtypes(statement, step, sources)
    made = [
        recipe.transposed() if transpose else recipe
        for recipe, transpose in zip(sources, step.left_transposed, strict=True)
    ]
    if statement.options.fused is not None:
        made = _fused(statement, number, step, made, context)
    elif statement.stacks:
        made = [_stack(statement, step, made)]
    elif len(made) > 1 or (len(step.rights) == 1 and isinstance(statement.options.sizes, tuple)):
        made = [_concat(statement, step, made)]
    made = [_permute(statement, step, recipe) for recipe in made]
    if statement.options.reshape is not None:
        made = [_reshape(statement, number, step, made[0], context)]
    made = [_cast(statement, recipe) for recipe in made]
    if statement.unstacks:
        made = _unstack(statement, step, made[0])
    elif len(made) == 1 and len(step.rights) > 1:
        made = _split(statement, number, step, made[0], context)
    return [
        recipe.transposed() if transpose else recipe
        for recipe, transpose in zip(made, step.right_transposed, strict=True)
    ]


def keys_with_shapes(names: Sequence[str], recipes: Recipes) -> str:
    """Format keys with their shapes for error messages."""
    known = [f"{name!r} {list(recipe.shape)}" for name, recipe in zip(names, recipes, strict=True)]
    return ", ".join(known[:6]) + (f" and {len(known) - 6} more" if len(known) > 6 else "")


def dim_of(statement: Statement, rank: int, default: int | None = None) -> int:
    """Return the dim that `axis=` selects in tensors of this rank."""
    axis = statement.options.axis if statement.options.axis is not None else default
    if axis is None or not -rank <= axis < rank:
        raise statement.error(f"axis={axis}: a tensor of {rank} dims has the axes {-rank} to {rank - 1}")
    return axis % rank


def _check_source_dtypes(statement: Statement, step: ExpandedStep, sources: Recipes) -> None:
    wanted = statement.options.src_dtype
    for name, recipe in zip(step.lefts, sources, strict=True):
        if wanted is not None and recipe.dtype is not wanted and recipe.dtype is not UNKNOWN:
            raise statement.error(f"{name!r} is {recipe.dtype.name}, not {wanted.name} as src_dtype= says")


def _check_shapes(statement: Statement, step: ExpandedStep, parts: Recipes, dim: int | None) -> None:
    """Check that joined parts differ in one dim only, and stacked parts in none."""
    first = parts[0]
    for part in parts[1:]:
        same_shape = len(part.shape) == len(first.shape) and all(
            a == b for d, (a, b) in enumerate(zip(part.shape, first.shape, strict=True)) if d != dim
        )
        if not same_shape:
            rule = (
                "stacked parts must have equal shapes"
                if dim is None
                else f"parts joined along axis {dim} must have equal shapes in all other dims"
            )
            raise statement.error(f"{rule}: {keys_with_shapes(step.lefts, parts)}")
        if part.dtype is not first.dtype and UNKNOWN not in (part.dtype, first.dtype):
            raise statement.error(
                f"joined parts must have one dtype, not {first.dtype.name} and {part.dtype.name}: "
                f"{keys_with_shapes(step.lefts, parts)}; cast them first"
            )


def _concat(statement: Statement, step: ExpandedStep, parts: Recipes) -> Recipe[str]:
    dim = dim_of(statement, len(parts[0].shape))
    _check_shapes(statement, step, parts, dim)
    sizes = statement.options.sizes
    found = tuple(part.shape[dim] for part in parts)
    if sizes == "equal":
        sizes = found[:1] * len(found)
    if isinstance(sizes, tuple) and sizes != found:
        raise statement.error(
            f"sizes={list(sizes)}, but the parts have {list(found)}: {keys_with_shapes(step.lefts, parts)}"
        )
    return Recipe.concat(parts, dim)


def _stack(statement: Statement, step: ExpandedStep, parts: Recipes) -> Recipe[str]:
    dim = dim_of(statement, len(parts[0].shape) + 1)
    _check_shapes(statement, step, parts, None)
    return Recipe.concat([part.unsqueezed(dim) for part in parts], dim)


def _unstack(statement: Statement, step: ExpandedStep, whole: Recipe[str]) -> Recipes:
    dim = dim_of(statement, len(whole.shape))
    if whole.shape[dim] != len(step.rights):
        raise statement.error(
            f"{step.lefts[0]!r} {list(whole.shape)} has {whole.shape[dim]} slices along axis {dim}, but there are "
            f"{len(step.rights)} keys for them: {', '.join(map(repr, step.rights[:6]))}"
        )
    return [part.squeezed(dim) for part in whole.split(dim, (1,) * len(step.rights))]


def _permute(statement: Statement, step: ExpandedStep, recipe: Recipe[str]) -> Recipe[str]:
    order = statement.options.permute
    if order is None:
        return recipe
    if not order:
        return recipe.transposed()
    if len(order) != len(recipe.shape):
        raise statement.error(
            f"permute={list(order)} needs {len(order)} dims, but there are {len(recipe.shape)}: "
            f"{step.lefts[0]!r} {list(recipe.shape)}"
        )
    return recipe.permuted(order)


def _reshape(
    statement: Statement, number: int, step: ExpandedStep, recipe: Recipe[str], context: StepContext
) -> Recipe[str]:
    """Reshape to `reshape=`, or to the target's shape if the tensor already has the shape of `reshape=`.

    AOA names the longer of two shapes and converts in either direction.
    """
    options = statement.options
    wanted, known = options.reshape, context.lookahead.whole(number, step)
    if options.src_shape is not None and recipe.shape != options.src_shape:
        raise statement.error(
            f"the shape before reshape is {list(recipe.shape)}, not {list(options.src_shape)} as src_shape= says"
        )
    if wanted == "targets" and known is None:
        raise statement.error(
            f"the shape of {', '.join(map(repr, step.rights[:6]))} is not known; add reshape=[...], or build the "
            "mapping with reverse(shapes) from the shapes of its sources"
        )
    if known is not None and wanted in ("targets", recipe.shape):
        wanted = known
    assert isinstance(wanted, tuple)
    try:
        context.work.spend(box_count(recipe.shape, wanted) * len(recipe.terms), statement)
        return reshaped(recipe, wanted)
    except ReshapeError as problem:
        what = f"{step.lefts[0]!r} {list(recipe.shape)} cannot be reshaped to {list(wanted)}"
        raise statement.error(f"{what}: {problem}") from None


def _cast(statement: Statement, recipe: Recipe[str]) -> Recipe[str]:
    dtype = statement.options.cast
    if dtype is None:
        return recipe
    if recipe.dtype.name != recipe.dtype.stored:
        raise statement.error(f"{recipe.dtype.name} cannot be cast")
    return recipe.cast(dtype)


def _split(statement: Statement, number: int, step: ExpandedStep, whole: Recipe[str], context: StepContext) -> Recipes:
    dim = dim_of(statement, len(whole.shape))
    return whole.split(dim, _split_sizes(statement, number, step, whole.shape, dim, context))


def _split_sizes(
    statement: Statement, number: int, step: ExpandedStep, shape: tuple[int, ...], dim: int, context: StepContext
) -> tuple[int, ...]:
    count, size = len(step.rights), shape[dim]
    what = f"{step.lefts[0]!r} {list(shape)} along axis {dim}"
    wanted = statement.options.sizes
    if wanted == "targets":
        wanted = _sizes_of_targets(statement, number, step, size, dim, context)
    if not isinstance(wanted, tuple):
        if size % count:
            raise statement.error(f"{what} does not split into {count} equal parts; add sizes=[...]")
        return (size // count,) * count
    if len(wanted) != count:
        raise statement.error(f"{len(wanted)} sizes for {count} parts: {', '.join(map(repr, step.rights[:6]))}")
    if sum(wanted) != size or min(wanted) < 0:
        raise statement.error(f"sizes={list(wanted)} sum to {sum(wanted)}, but {what} has {size}")
    return wanted


def _sizes_of_targets(
    statement: Statement, number: int, step: ExpandedStep, size: int, dim: int, context: StepContext
) -> tuple[int, ...]:
    sizes: list[int | None] = []
    for name, transposed in zip(step.rights, step.right_transposed, strict=True):
        shape = context.lookahead.shape(number, name)
        if shape is not None and dim < len(shape):
            sizes.append(shape[::-1][dim] if transposed else shape[dim])
        else:
            sizes.append(None)
    unknown = [name for name, found in zip(step.rights, sizes, strict=True) if found is None]
    if len(unknown) == len(sizes) and statement.aoa and not size % len(sizes):
        return (size // len(sizes),) * len(sizes)  # AOA only splits evenly
    if len(unknown) > 1:
        raise statement.error(
            f"the sizes of {', '.join(map(repr, unknown[:6]))} are not known; add sizes=[...], or build the mapping "
            "with reverse(shapes) from the shapes of its sources"
        )
    rest = size - sum(found for found in sizes if found is not None)
    return tuple(rest if found is None else found for found in sizes)


def _fused(statement: Statement, number: int, step: ExpandedStep, made: Recipes, context: StepContext) -> Recipes:
    dim = dim_of(statement, len(made[0].shape), default=1)
    try:
        if len(made) > 1:
            _check_shapes(statement, step, made, dim)
            return [_fuse(statement, made, dim, _target_degree(statement, number, step, context), context.work)]
        options = statement.options
        degree = _source_degree(statement, len(step.rights), context)
        sizes = _sizes_of_heads(statement, number, step, made[0].shape, dim, degree, context)
        context.work.spend(segment_count(options, degree), statement)
        parts = unfuse(made[0], segments_of(options, sizes, degree, equal_heads=False), dim)
        if len(step.rights) > 1:
            return parts
        return [_fuse(statement, parts, dim, _target_degree(statement, number, step, context), context.work)]
    except FusionError as problem:
        raise statement.error(f"{problem}: {keys_with_shapes(step.lefts, made)}, axis {dim}") from None


def _sizes_of_heads(
    statement: Statement,
    number: int,
    step: ExpandedStep,
    shape: tuple[int, ...],
    dim: int,
    degree: int,
    context: StepContext,
) -> tuple[int, ...]:
    """Return the sizes to split a fused weight into: as given, from the targets, or for heads of one size."""
    options = statement.options
    if options.fused == "fused_ffn" or len(step.rights) == 1:
        return part_sizes(options, shape[dim], degree)
    sizes = options.sizes if isinstance(options.sizes, tuple) else _target_sizes(number, step, dim, context)
    if sizes is None and options.sizes == "targets" and not statement.aoa:
        raise statement.error(
            f"the sizes of {', '.join(map(repr, step.rights))} are not known; add sizes=[q, k, v], or build the "
            "mapping with reverse(shapes) from the shapes of its sources"
        )
    if sizes is None or (options.sizes is None and len(set(_per_head(options, sizes))) == 1):
        return part_sizes(options, shape[dim], degree)
    check_part_sizes(options, sizes, shape[dim], degree)
    return sizes


def _per_head(options: Options, sizes: Sequence[int]) -> list[float]:
    counts = (options.num_heads, options.num_key_value_groups, options.num_key_value_groups)
    return [size / (count or 1) for size, count in zip(sizes, counts, strict=True)]


def _target_sizes(number: int, step: ExpandedStep, dim: int, context: StepContext) -> tuple[int, ...] | None:
    """Return the sizes of all right names along a dim, if known."""
    sizes = []
    for name, transposed in zip(step.rights, step.right_transposed, strict=True):
        shape = context.lookahead.shape(number, name)
        if shape is None or dim >= len(shape):
            return None
        sizes.append(shape[::-1][dim] if transposed else shape[dim])
    return tuple(sizes)


def _fuse(statement: Statement, parts: Recipes, dim: int, degree: int, work: WorkBudget) -> Recipe[str]:
    sizes = [part.shape[dim] for part in parts]
    work.spend(segment_count(statement.options, degree), statement)
    return fuse(parts, segments_of(statement.options, sizes, degree, equal_heads=not statement.aoa), dim)


def _source_degree(statement: Statement, rights: int, context: StepContext) -> int:
    options = statement.options
    degree = options.src_tp_degree or (options.tp_degree if rights > 1 else None)
    return _known_degree(statement, degree or context.source_tp, "source")


def _target_degree(statement: Statement, number: int, step: ExpandedStep, context: StepContext) -> int:
    options = statement.options
    degree = options.dst_tp_degree or options.tp_degree
    if degree is None and options.fused != "fused_qkv":
        degree = _degree_of_final_targets(statement, number, step.rights[0], context)
    return _known_degree(statement, degree or context.source_tp, "target")


def _degree_of_final_targets(statement: Statement, number: int, name: str, context: StepContext) -> int | None:
    """Return the degree of the target, also if the statement makes a temporary on the way to it."""
    degrees = {target: context.target_tp(target) for target in sorted(context.lookahead.final_targets(number, name))}
    found = {degree for degree in degrees.values() if degree is not None}
    if len(found) > 1:
        degrees_text = ", ".join(f"{target!r} {degree}" for target, degree in degrees.items())
        raise statement.error(f"{name!r} is used by targets of several TP degrees: {degrees_text}; add tp_degree=")
    return next(iter(found), None)


def _known_degree(statement: Statement, degree: int | None, side: str) -> int:
    if statement.options.fused == "fused_qkv":
        return 1
    if degree is None:
        raise statement.error(
            f"the order in a {statement.options.fused} weight depends on its TP degree, and the degree of the "
            f"{side} is not known: add tp_degree=, or convert with --tp-degree"
        )
    return degree
