"""Which way round a mapping leaves the weights of Linear layers, for a sink that turns them by itself."""

from __future__ import annotations

from holdfast.convert.sinks.paddle import is_linear, told_layout
from holdfast.core.errors import Unsupported
from holdfast.plan.contents import Contents
from holdfast.plan.files import Place

_Orders = dict[Place, tuple[int, ...]]


def check_orientation(before: Contents, after: Contents) -> None:
    """Raise Unsupported where a mapping has turned Linear weights to [in, out], which Paddle's files do not have.

    They hold models as Hugging Face does; their masters and moments the sink turns. To turn what is
    turned would give a checkpoint that looks right and is not.
    """
    stored = {place: order for name in before.groups for place, order in _orders(before, name, linear=False).items()}
    for name, group in after.groups.items():
        if group.kind != "module" or told_layout({key: recipe.shape for key, recipe in group.tensors.items()}) is False:
            continue
        turned = [
            place
            for place, order in _orders(after, name, linear=True).items()
            if sorted(order) == [0, 1] and stored.get(place, order) != order
        ]
        if turned:
            raise Unsupported(
                f"{name}: the mapping turns {turned[0].spec.key!r}, and --to paddle expects models as Hugging Face has "
                "them, [out, in]: it turns masters and moments by itself; leave the mapping out, take one that does "
                "not turn, or write --to holdfast"
            )


def _orders(contents: Contents, name: str, *, linear: bool) -> _Orders:
    """In which order the dims of each place are taken by a group's matrices."""
    return {
        term.source: term.order
        for key, recipe in contents.groups[name].tensors.items()
        if len(recipe.shape) == 2 and (is_linear(key) or not linear)
        for term in recipe.terms
    }
