"""Checks of a parsed statement alone: the number of keys, allowed combinations of options, fused forms."""

from __future__ import annotations

from dataclasses import replace

from holdfast.mapping.syntax.statement import Options, Statement, is_many

_FUSED_COUNTS = {
    "fused_ffn": ((2, 1), (1, 2), (1, 1)),
    "fused_qkv": ((3, 1), (1, 3)),
    "fused_qkv_old": ((3, 1), (1, 3), (1, 1)),
}
_FUSED_NAMES = {"fused_ffn": "gate, up", "fused_qkv": "q, k, v", "fused_qkv_old": "q, k, v"}
_TP = ("tp_degree", "src_tp_degree", "dst_tp_degree")
_HEADS = ("num_heads", "num_key_value_groups")


def form_problem(statement: Statement) -> str | None:
    """Return why a statement is invalid whatever the keys and shapes are, or None."""
    lefts, rights, options = statement.lefts, statement.rights, statement.options
    if not lefts or not rights:
        return _one_sided_problem(statement)
    free = _has_free_holes(statement)
    right_many = is_many(rights) or free
    if options.fused is not None:
        return _fused_problem(statement, free) or _cast_problem(options)
    for name in (*_TP, *_HEADS):
        if getattr(options, name) is not None:
            return f"{name} needs a fused form: add fused_ffn, fused_qkv or fused_qkv_old"
    if is_many(lefts) and right_many:
        return (
            "only one side can have several keys; to map many keys one by one, use an id such as $LAYER_ID instead of *"
        )
    if options.src_shape is not None and options.reshape is None:
        return "src_shape= needs reshape=: src_shape= is the shape before the reshape"
    return _parts_problem(options, is_many(lefts), right_many) or _cast_problem(options)


def with_unstack(statement: Statement) -> Statement:
    """Replace `stack` by `unstack` where several right keys imply it."""
    options = statement.options
    cuts = not is_many(statement.lefts) and (is_many(statement.rights) or _has_free_holes(statement))
    if not (options.stack and cuts) or options.unstack:
        return statement
    return replace(statement, options=replace(options, stack=False, unstack=True))


def _has_free_holes(statement: Statement) -> bool:
    """Return True if a hole appears only on the right."""
    bound = {hole.name for key in statement.lefts for hole in key.holes}
    return any(hole.name not in bound for key in statement.rights for hole in key.holes)


def _one_sided_problem(statement: Statement) -> str | None:
    what = "removes sources" if statement.lefts else "keeps targets unchanged"
    if statement.options != Options(optional=statement.options.optional):
        return f"a statement that {what} takes no option except optional"
    if any(key.transposed for key in (*statement.lefts, *statement.rights)):
        return f"a statement that {what} has nothing to transpose"
    return None


def _parts_problem(options: Options, left_many: bool, right_many: bool) -> str | None:
    many = left_many or right_many
    stacked = options.stack or options.unstack
    if (many or stacked) and options.axis is None:
        return f"axis= is missing: along which dim are the parts {'joined' if left_many else 'split'}?"
    if stacked and options.sizes is not None:
        return "stack takes no sizes=: every part is one slice"
    if options.unstack and (left_many or options.stack):
        return "unstack splits one tensor into the slices of a dim; stack joins several"
    if options.sizes is not None and not many:
        return "sizes= needs several keys on one side"
    if options.sizes == "targets" and not right_many:
        return "sizes=targets needs a split"
    if options.sizes == "any":
        return "sizes=any needs fused_qkv or fused_qkv_old, where heads of q, k and v may differ in size"
    if options.parts is not None and not many:
        return "parts= needs a * or an id that appears only on the right"
    return None


def _cast_problem(options: Options) -> str | None:
    if options.dtype is not None and (options.src_dtype is not None or options.dst_dtype is not None):
        return "use either dtype= or src_dtype= with dst_dtype="
    if (options.src_dtype is None) != (options.dst_dtype is None):
        return "src_dtype= and dst_dtype= must be used together; dtype= alone casts any source dtype"
    return None


def _fused_problem(statement: Statement, free: bool) -> str | None:
    options = statement.options
    form = str(options.fused)
    keys = (*statement.lefts, *statement.rights)
    counts = (len(statement.lefts), len(statement.rights))
    parts = _FUSED_NAMES[form]
    if any(key.has_star or key.array is not None for key in keys) or free:
        return f"{form} needs its keys one by one: no * and no arrays"
    if counts not in _FUSED_COUNTS[form]:
        reorder = "" if form == "fused_qkv" else f" or `w -> w2, {form}`"
        return f"{form} is written `{parts} -> w, {form}` or `w -> {parts}, {form}`{reorder}"
    if options.stack or options.unstack:
        return f"{form} cannot be combined with stack: fuse to a temporary name first, then stack"
    if options.reshape is not None or options.src_shape is not None:
        return f"{form} cannot be combined with reshape=: fuse to a temporary name first, then reshape"
    if options.parts is not None:
        return f"{form} takes neither sizes= nor parts=: they follow from the heads and degrees"
    if options.sizes is not None:
        problem = _fused_sizes_problem(form, options, counts)
        if problem:
            return problem
    heads = [name for name in _HEADS if getattr(options, name) is not None]
    if form == "fused_ffn" and heads:
        return f"fused_ffn takes no {heads[0]}="
    if form != "fused_ffn" and len(heads) < 2:
        return f"{form} needs num_heads= and num_key_value_groups= (the number of key and value heads)"
    if form == "fused_qkv" and any(getattr(options, name) is not None for name in _TP):
        return "fused_qkv does not depend on the TP degree: remove tp_degree= or use fused_qkv_old"
    if options.num_heads and options.num_key_value_groups and options.num_heads % options.num_key_value_groups:
        return (
            f"num_heads={options.num_heads} is not a multiple of num_key_value_groups="
            f"{options.num_key_value_groups}; groups counts the key and value heads"
        )
    return _degree_problem(options, counts)


def _fused_sizes_problem(form: str, options: Options, counts: tuple[int, int]) -> str | None:
    sizes = options.sizes
    if form == "fused_ffn":
        return "fused_ffn takes neither sizes= nor parts=: gate and up are equal"
    if counts == (1, 1):
        return f"`w -> w2, {form}` takes no sizes=: its heads have one size"
    if isinstance(sizes, tuple) and len(sizes) != 3:
        return f"sizes={list(sizes)}: {form} has three parts, q, k and v"
    if sizes == "any" and counts[0] == 1:
        return "sizes=any is for the statement that fuses; the one that splits uses sizes=targets"
    if sizes == "targets" and counts[0] > 1:
        return "sizes=targets is for the statement that splits; the one that fuses uses sizes=any"
    return None


def _degree_problem(options: Options, counts: tuple[int, int]) -> str | None:
    has_tp_degree = options.tp_degree is not None
    if has_tp_degree and ((counts[0] > 1 or counts == (1, 1)) and options.dst_tp_degree is not None):
        return "use either tp_degree= or dst_tp_degree="
    if has_tp_degree and counts[1] > 1 and options.src_tp_degree is not None:
        return "use either tp_degree= or src_tp_degree="
    if counts[0] > 1 and options.src_tp_degree is not None:
        return "src_tp_degree= is for a fused source; here the target is fused"
    if counts[1] > 1 and options.dst_tp_degree is not None:
        return "dst_tp_degree= is for a fused target; here the source is fused"
    return None
