"""The bytes of a blocking save, read from live tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from holdfast.adapters.saving.save_item import SaveItem, stored_view
from holdfast.adapters.tensors import part_view, raw_array
from holdfast.layout.box import Box
from holdfast.layout.placement import ShardBox
from holdfast.plan.arrays import RawArray
from holdfast.plan.files import Place

_CACHED_TENSORS = 2


class LiveSources:
    """The bytes of this rank's shards by place, without copies where possible."""

    def __init__(self, items: Mapping[tuple[str, str], list[SaveItem]], group_of: Mapping[str, str]) -> None:
        self._items = items
        self._group_of = group_of
        self._cache: OrderedDict[tuple[int, Box], RawArray] = OrderedDict()

    def array(self, place: Place, held: Box) -> RawArray:
        for item, part in self._parts(place):
            if part.box == held:
                return self._array(item, part)
        raise AssertionError(f"{place.spec.key}: the plan names a shard that this rank does not hold")

    def _parts(self, place: Place) -> Iterator[tuple[SaveItem, ShardBox]]:
        for item in self._items[self._group_of[place.file], place.spec.key]:
            for part in item.holder.parts:
                yield item, part

    def _array(self, item: SaveItem, part: ShardBox) -> RawArray:
        if item.cast is None and item.holder.local.device.type == "cpu":
            return raw_array(part_view(item.holder, part))
        # Blocks arrive in file order, so the most recently used tensors are needed next.
        address = (id(item), part.box)
        if address not in self._cache:
            view = stored_view(item, part).to("cpu")
            self._cache[address] = raw_array(view)
            while len(self._cache) > _CACHED_TENSORS:
                self._cache.popitem(last=False)
        return self._cache[address]
