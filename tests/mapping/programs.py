"""Random programs together with what numpy says they make: statements are drawn in a chain, sources as needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from tests.mapping.arrays import Array, numbered

Draw = Callable[[st.SearchStrategy[int]], int]


@dataclass
class Drawn:
    """A program, its sources, and the targets that it makes; `removed` sources do not come back."""

    draw: Draw
    statements: list[str] = field(default_factory=list)
    sources: dict[str, Array] = field(default_factory=dict)
    targets: dict[str, Array] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    forms: set[str] = field(default_factory=set)
    _count: int = 0

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def name(self, stem: str = "") -> str:
        self._count += 1
        style = ("n{}.w", "layer-{}/w", "{}", "m.{}_x")[self.number(0, 3)]
        return stem + style.format(f"k{self._count}")

    def source(self, shape: tuple[int, ...], name: str | None = None) -> str:
        """A fresh source; its numbers are those of no other."""
        key = self.name() if name is None else name
        self.sources[key] = numbered(shape, begin=1000 * len(self.sources))
        self.targets[key] = self.sources[key]
        return key

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rank = self.number(1, 3) if rank is None else rank
        return tuple(self.number(1, 4) for _ in range(rank))

    def value(self) -> str:
        """Something to go on with: what was made before, or a fresh source."""
        if self.targets and self.number(0, 3):
            return list(self.targets)[self.number(0, len(self.targets) - 1)]
        return self.source(self.shape())

    def take(self, key: str) -> Array:
        return self.targets.pop(key)

    def say(self, form: str, text: str, **made: Array) -> None:
        self.say_all(form, text, made)

    def say_all(self, form: str, text: str, made: dict[str, Array]) -> None:
        self.forms.add(form)
        self.statements.append(text)
        self.targets.update(made)


def rename(p: Drawn) -> None:
    key, new = p.value(), p.name()
    p.say_all("rename", f"{key} -> {new}", {new: p.take(key)})


def tied(p: Drawn) -> None:
    key, one, two = p.value(), p.name(), p.name()
    array = p.take(key)
    p.say_all("tied", f"{key} -> {one}\n{key}^T -> {two}", {one: array, two: array.transpose()})


def transpose(p: Drawn) -> None:
    key, new = p.value(), p.name()
    text = f"{key}^T -> {new}" if p.number(0, 1) else f"{key} -> {new}^T"
    p.say_all("transpose", text, {new: p.take(key).transpose()})


def permute(p: Drawn) -> None:
    key, new = p.value(), p.name()
    array = p.take(key)
    order = list(range(array.ndim))
    for at in range(array.ndim - 1, 0, -1):
        other = p.number(0, at)
        order[at], order[other] = order[other], order[at]
    if p.number(0, 3):
        p.say_all("permute", f"{key} -> {new}, permute='{order}'", {new: array.transpose(order)})
    else:
        p.say_all("permute", f'{key} -> {new}, permute="[]"', {new: array.transpose()})


def cast(p: Drawn) -> None:
    key, new = p.value(), p.name()
    array = p.take(key)
    other = "float64" if array.dtype == np.float32 else "float32"
    text = f"{key} -> {new}, src_dtype='{array.dtype.name}', dst_dtype='{other}'"
    p.say_all("cast", text, {new: array.astype(other)})


def axis_of(p: Drawn, rank: int) -> tuple[int, str]:
    dim = p.number(0, rank - 1)
    return dim, str(dim if p.number(0, 1) else dim - rank)


def like(p: Drawn, array: Array, dim: int) -> tuple[int, ...]:
    return tuple(p.number(1, 4) if d == dim else size for d, size in enumerate(array.shape))


def concat(p: Drawn) -> None:
    first, new = p.value(), p.name()
    dim, axis = axis_of(p, p.targets[first].ndim)
    if p.targets[first].dtype != np.float32:
        return
    keys = [first, *(p.source(like(p, p.targets[first], dim)) for _ in range(p.number(1, 3)))]
    turned = [bool(p.number(0, 2) == 0) and p.targets[key].ndim == 2 and key != first for key in keys]
    arrays = []
    for key, turn in zip(keys, turned, strict=True):
        if turn:  # it is kept turned, so that it fits when it is turned back
            p.sources[key] = p.sources[key].transpose().copy()
        arrays.append(p.take(key))
    text = ", ".join(f"{key}^T" if turn else key for key, turn in zip(keys, turned, strict=True))
    p.say_all("concat", f"{text} -> {new}, axis={axis}", {new: np.concatenate(arrays, dim)})


def split(p: Drawn) -> None:
    key = p.value()
    array = p.take(key)
    dim, axis = axis_of(p, array.ndim)
    count = p.number(2, 3)
    names = [p.name() for _ in range(count)]
    if array.shape[dim] % count == 0 and p.number(0, 1):
        parts, sizes = np.split(array, count, dim), ""
    else:
        cuts = sorted(p.number(0, array.shape[dim]) for _ in range(count - 1))
        parts = np.split(array, cuts, dim)
        sizes = f", sizes={[part.shape[dim] for part in parts]}"
    turned = [bool(p.number(0, 3) == 0) for _ in parts]
    text = ", ".join(f"{name}^T" if turn else name for name, turn in zip(names, turned, strict=True))
    results = [part.transpose() if turn else part for part, turn in zip(parts, turned, strict=True)]
    p.say_all("split", f"{key} -> {text}, axis={axis}{sizes}", dict(zip(names, results, strict=True)))


def star(p: Drawn) -> None:
    stem, new = p.name("e"), p.name()
    shape = p.shape(2)
    dim, axis = axis_of(p, 2)
    numbers = sorted({p.number(0, 12) for _ in range(p.number(1, 4))})
    keys = {n: p.source(like(p, np.empty(shape), dim), f"{stem}.{n}.w") for n in reversed(numbers)}
    arrays = [p.take(keys[n]) for n in numbers]
    p.say_all("star", f"{stem}.*.w -> {new}, axis={axis}", {new: np.concatenate(arrays, dim)})


def stack_with_gaps(p: Drawn) -> None:
    stem, new, shape = p.name("s"), p.name(), p.shape()
    dim, axis = axis_of(p, len(shape) + 1)
    numbers = sorted({p.number(0, 3) for _ in range(p.number(1, 4))})
    keys = {n: p.source(shape, f"{stem}.{n}.w") for n in reversed(numbers)}
    arrays = [p.take(keys[n]) for n in numbers]
    p.say_all("stack", f"{stem}.*.w -> {new}, axis={axis}, stack", {new: np.stack(arrays, dim)})


def unstack(p: Drawn) -> None:
    key, stem = p.value(), p.name("u")
    if p.targets[key].ndim < 2 or 0 in p.targets[key].shape:
        return
    array = p.take(key)
    dim, axis = axis_of(p, array.ndim)
    count = array.shape[dim]
    names = [f"{stem}.{n}.w" for n in range(count)]
    turn = "^T" if p.number(0, 2) == 0 else ""
    right = f"{stem}.*.w{turn}" if count == 1 or p.number(0, 1) else ", ".join(f"{name}{turn}" for name in names)
    parts = f", parts={count}" if "*" in right else ""
    slices = (array.take(n, dim) for n in range(count))
    made = {name: part.transpose() if turn else part for name, part in zip(names, slices, strict=True)}
    p.say_all("unstack", f"{key} -> {right}, axis={axis}, stack{parts}", made)


def array(p: Drawn) -> None:
    key, stem = p.value(), p.name("x")
    if 0 in p.targets[key].shape:
        return
    value = p.take(key)
    dim, axis = axis_of(p, value.ndim)
    begin, count = p.number(0, 2), value.shape[dim]
    names = [f"{stem}_{n}" for n in range(begin, begin + count)]
    made = dict(zip(names, np.split(value, count, dim), strict=True))
    p.say_all("array", f"{key} -> {stem}[{begin}:{begin + count}], axis={axis}", made)


def stack(p: Drawn) -> None:
    """Parts that become slices of a new dim, by a star or one by one, or the other way round."""
    form, count = p.number(0, 2), p.number(2, 3)
    shape = p.shape(p.number(form // 2, 2))
    dim, axis = axis_of(p, len(shape) + 1)
    stem, new = p.name("s"), p.name()
    parts = {f"{stem}.{n}": numbered(shape, begin=100 * n) for n in range(count)}
    whole = {new: np.stack(list(parts.values()), dim)}
    if form == 0:
        sources(p, parts)
        p.say_all("stack", f"{stem}.* -> {new}, axis={axis}, stack", whole)
    elif form == 1:
        sources(p, parts)
        p.say_all("stack", f"{', '.join(parts)} -> {new}, axis={axis}, stack", whole)
    else:
        sources(p, whole)
        p.say_all("stack", f"{new} -> {stem}.*, axis={axis}, stack", parts)


def ids(p: Drawn) -> None:
    """Ragged: every layer has experts of its own number."""
    stem, new = p.name("m"), p.name("o")
    made = {}
    for layer in range(p.number(1, 2)):
        for expert in range(p.number(1, 3)):
            shape = p.shape(2)
            gate = p.source(shape, f"{stem}.{layer}.e.{expert}.g")
            up = p.source(like(p, np.empty(shape), 1), f"{stem}.{layer}.e.{expert}.u")
            made[f"{new}.{expert}.{layer}"] = np.concatenate([p.take(gate), p.take(up)], 1)
    left = f"{stem}.$LAYER_ID.e.$EXPERT_ID"
    p.say_all("ids", f"{left}.g, {left}.u -> {new}.$EXPERT_ID.$LAYER_ID, axis=1", made)


def offset(p: Drawn) -> None:
    stem = p.name("l")
    made = {}
    count = p.number(1, 3)
    for layer in range(1, count + 1):
        made[f"{stem}.{layer - 1}.w"] = p.take(p.source(p.shape(1), f"{stem}.{layer}.w"))
    p.say_all("offset", f"{stem}.$LAYER_ID_OFFSET.w -> {stem}.$LAYER_ID_OFFSET.w", made)


def fused_ffn(p: Drawn) -> None:
    gate_name, up_name, new = p.name(), p.name(), p.name()
    degree, other = p.number(1, 3), p.number(1, 3)
    rows = p.number(1, 3)
    size = degree * other * p.number(1, 2)
    gate, up = numbered((rows, size), begin=100), numbered((rows, size), begin=300)
    fused = per_rank([gate, up], [degree, degree])
    form = p.number(0, 2)
    if form == 0:
        sources(p, {gate_name: gate, up_name: up})
        p.say_all("fused_ffn", f"{gate_name}, {up_name} -> {new}, fused_ffn, tp_degree={degree}", {new: fused})
    elif form == 1:
        sources(p, {new: fused})
        p.say_all(
            "fused_ffn",
            f"{new} -> {gate_name}, {up_name}, fused_ffn, tp_degree={degree}",
            {gate_name: gate, up_name: up},
        )
    else:
        sources(p, {gate_name: fused})
        text = f"{gate_name} -> {new}, fused_ffn, src_tp_degree={degree}, dst_tp_degree={other}"
        p.say_all("fused_ffn", text, {new: per_rank([gate, up], [other, other])})


def per_rank(parts: list[Array], pieces: list[int]) -> Array:
    """Every part cut into pieces along dim 1, then the first of each, the second of each and so on."""
    cut = [np.split(part, count, 1) for part, count in zip(parts, pieces, strict=True)]
    return np.concatenate([piece for row in zip(*cut, strict=True) for piece in row], 1)


def old_fused(parts: list[Array], groups: int, degree: int) -> Array:
    """Per rank [Q, K, V]; key and value heads are repeated where there are more ranks than heads."""
    if degree > groups:
        repeat = degree // groups
        heads = [np.split(part, groups, 1) for part in parts[1:]]
        parts = [parts[0], *(np.concatenate([h for h in some for _ in range(repeat)], 1) for some in heads)]
    return per_rank(parts, [degree] * 3)


def sources(p: Drawn, arrays: dict[str, Array]) -> None:
    """Sources with given values, which a statement takes at once."""
    p.sources.update(arrays)


def fused_qkv(p: Drawn) -> None:
    q_name, k_name, v_name, new = (p.name() for _ in range(4))
    groups, size, rows = p.number(1, 4), p.number(1, 2), p.number(1, 3)
    heads = groups * p.number(1, 3)
    q, k, v = (numbered((rows, n * size), begin=at) for n, at in ((heads, 100), (groups, 400), (groups, 700)))
    parts = {q_name: q, k_name: k, v_name: v}
    numbers = f"num_heads={heads}, num_key_value_groups={groups}"
    names = ", ".join(parts)
    degrees = [d for d in range(1, heads + 1) if heads % d == 0 and (groups % d == 0 or d % groups == 0)]
    if p.number(0, 1):
        fused, form = per_rank([q, k, v], [groups] * 3), "fused_qkv"
    else:
        degree = degrees[p.number(0, len(degrees) - 1)]
        fused, form = old_fused([q, k, v], groups, degree), "fused_qkv_old"
        numbers += f", tp_degree={degree}"
    if form == "fused_qkv_old" and p.number(0, 2) == 0:
        other = degrees[p.number(0, len(degrees) - 1)]
        sources(p, {q_name: fused})
        text = f"{q_name} -> {new}, {form}, {numbers.replace('tp_degree', 'src_tp_degree')}, dst_tp_degree={other}"
        p.say_all(form, text, {new: old_fused([q, k, v], groups, other)})
    elif p.number(0, 1):
        sources(p, parts)
        p.say_all(form, f"{names} -> {new}, {form}, {numbers}", {new: fused})
    else:
        sources(p, {new: fused})
        p.say_all(form, f"{new} -> {names}, {form}, {numbers}", parts)


def remove(p: Drawn) -> None:
    key = p.source(p.shape())
    p.take(key)
    p.removed.add(key)
    p.say("remove", f"{key} -> _")


def add(p: Drawn) -> None:
    key = p.name("z")
    p.kept.add(key)
    p.say("add", f"_ -> {key}")


def leave(p: Drawn) -> None:
    p.source(p.shape())
    p.forms.add("identity")


FORMS = (
    rename, tied, transpose, permute, cast, concat, concat, split, split, star, array, ids, offset, fused_ffn,
    fused_qkv, fused_qkv, stack, stack_with_gaps, unstack, unstack, remove, add, leave,
)  # fmt: skip


@st.composite
def programs(draw: Draw) -> Drawn:
    """A program of up to five statements."""
    drawn = Drawn(draw)
    for _ in range(drawn.number(1, 5)):
        FORMS[drawn.number(0, len(FORMS) - 1)](drawn)
    return drawn
