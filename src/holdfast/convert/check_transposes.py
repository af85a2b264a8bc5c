"""Check that a mapping does not transpose Linear weights, because the Paddle sink transposes them itself."""

from __future__ import annotations

from holdfast.convert.sinks.paddle import infer_layout, is_linear
from holdfast.core.errors import Unsupported
from holdfast.plan.contents import Contents
from holdfast.plan.files import Place

_Orders = dict[Place, tuple[int, ...]]


def check_transposes(before: Contents, after: Contents) -> None:
    """Raise Unsupported if a mapping has transposed Linear weights to [in, out].

    Paddle's files store models in Hugging Face's order, and the sink transposes masters and moments.
    Transposing them twice would give a checkpoint that looks right but is wrong.
    """
    stored = {place: order for name in before.groups for place, order in _orders(before, name, linear=False).items()}
    for name, group in after.groups.items():
        if (
            group.kind != "module"
            or infer_layout({key: recipe.shape for key, recipe in group.tensors.items()}) is False
        ):
            continue
        transposed = [
            place
            for place, order in _orders(after, name, linear=True).items()
            if sorted(order) == [0, 1] and stored.get(place, order) != order
        ]
        if transposed:
            raise Unsupported(
                f"{name}: the mapping transposes {transposed[0].spec.key!r}, but --to paddle expects Hugging Face's "
                "order, [out, in], and transposes masters and moments itself; omit the mapping, use one that does "
                "not transpose, or use --to holdfast"
            )


def _orders(contents: Contents, name: str, *, linear: bool) -> _Orders:
    """Return the order of dims in which a group's matrices use each place."""
    return {
        term.source: term.order
        for key, recipe in contents.groups[name].tensors.items()
        if len(recipe.shape) == 2 and (is_linear(key) or not linear)
        for term in recipe.terms
    }
