"""Collect the tensors, values and config files that a rank saves; read tensor bytes in a blocking save."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from holdfast.adapters.hooks import check_optimizer_save
from holdfast.adapters.huggingface import adapter_kind
from holdfast.adapters.live_state import LiveState
from holdfast.adapters.low_bit_optimizers import MixedStates, is_empty_beside_blocks, is_low_bit
from holdfast.adapters.module import memory_identity, unwrap
from holdfast.adapters.optimizer import (
    DeclaresShards,
    StateTensor,
    group_options,
    key_of_param,
    spanned_params,
    view_optimizer,
)
from holdfast.adapters.optimizer_options import option_groups
from holdfast.adapters.peft import peft_model
from holdfast.adapters.saving.entry_files import entry_files, plan_of
from holdfast.adapters.saving.tree_digests import item_digest, tensors_by_top_key, tensors_digest
from holdfast.adapters.subclass_tensors import InnerTensor, SubclassView, is_subclass, own_shard, view_subclass
from holdfast.adapters.tensors import Holder, Holders, part_view, raw_array
from holdfast.adapters.tree import Tree, flatten
from holdfast.core.errors import HoldfastError, LayoutError
from holdfast.core.names import BASE, check_key, masters_group
from holdfast.format import statejson
from holdfast.format.dtypes import DType, model_dtype_named
from holdfast.layout.coordinates import key_at
from holdfast.layout.placement import ShardBox
from holdfast.plan.files import RawArray, ShardPiece
from holdfast.plan.state_values import (
    BASE_MODEL,
    BASE_PREFIX,
    FILE,
    FILE_PREFIX,
    OPTIMIZER,
    PLAN,
    PLAN_PREFIX,
    SPLIT_DICT,
    TREE,
    RankValue,
)
from holdfast.plan.subclass_keys import SUBCLASSES, entry_name


@dataclass(slots=True, eq=False)  # not frozen: each save makes one per tensor, and frozen ones take twice as long
class SaveItem:
    """A tensor of which this rank holds parts: its group, key and role.

    `cast` is the dtype it is rounded to when written; `source` is the live tensor that has its memory.
    """

    group: str
    key: str
    role: str  # "parameter", "buffer", "state" or "value"
    holder: Holder
    cast: DType | None = None
    source: weakref.ref[torch.Tensor] | None = None
    outer: str = ""  # the key of the tensor subclass that holds it, if any

    @property
    def stored(self) -> DType:
        return self.cast or self.holder.stored

    @property
    def logical(self) -> DType:
        return self.cast or self.holder.logical


def stored_view(item: SaveItem, part: ShardBox) -> torch.Tensor:
    """Return a part with the values stored in the file, still on its device."""
    view = part_view(item.holder, part)
    return view.to(getattr(torch, item.cast.name)) if item.cast else view


class LiveSources:
    """The bytes of this rank's shards by place, without copies where possible."""

    def __init__(self, items: Mapping[tuple[str, str], list[SaveItem]], group_of: Mapping[str, str]) -> None:
        self._items = items
        self._group_of = group_of
        # Other threads copy from the devices, on streams that do not wait for those of the program.
        for device in {item.holder.local.device for found in items.values() for item in found}:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)

    def array(self, piece: ShardPiece) -> RawArray:
        item, part = self._shard(piece)
        view = part_view(item.holder, part)[piece.part.within(piece.held)]
        if item.cast is not None:
            view = view.to(getattr(torch, item.cast.name))
        return raw_array(view.to("cpu"))

    def _shard(self, piece: ShardPiece) -> tuple[SaveItem, ShardBox]:
        place = piece.run.place
        for item in self._items[self._group_of[place.file], place.spec.key]:
            for part in item.holder.parts:
                if part.box == piece.held:
                    return item, part
        raise AssertionError(f"{place.spec.key}: the plan names a shard that this rank does not hold")


class Chooses(Protocol):
    """The selection of a save, as far as collecting a state asks it."""

    def drops(self, name: str, *, inside: bool = False, optimizer: bool = False) -> bool: ...

    def selects(
        self, kinds: Mapping[str, str], aliases: Mapping[str, Mapping[str, str]], group: str, key: str
    ) -> bool: ...


@dataclass(slots=True)
class Collected:
    """One rank's state, ready to be planned."""

    items: list[SaveItem] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    trees: dict[str, Tree] = field(default_factory=dict)
    tree_kinds: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    plans: dict[str, Any] = field(default_factory=dict)
    bases: Mapping[str, Any] = field(default_factory=dict)  # the records of base models that this rank reports
    owners: dict[str, list[str]] = field(default_factory=dict)
    live_optimizers: dict[str, Any] = field(default_factory=dict)
    holders: Holders = field(default_factory=Holders)
    subclasses: dict[str, dict[str, Any]] = field(default_factory=dict)  # by group and key: descriptions
    by_coordinate: frozenset[tuple[str, str]] = frozenset()  # states that every coordinate stores for itself
    quantized: MixedStates | None = None
    notices: list[str] = field(default_factory=list)  # warnings for the user about this state
    left_out: list[str] = field(default_factory=list)  # groups with tensors that cannot be stored and are not selected
    selection: Chooses | None = None
    fixed: int = 0  # number of items that belong to modules and optimizers; these come first

    def signature(self) -> Any:
        """Return a value that is equal while this rank holds the same tensors in the same layout."""
        items = [
            (o.group, o.key, o.role, o.logical.name, o.holder.shape, o.holder.parts, o.holder.local.device, o.outer)
            for o in self.items
        ]
        return items, dict(self.kinds), dict(self.aliases), dict(self.owners)

    def add(self, group: str, key: str, role: str, value: StateTensor, cast: DType | None = None) -> None:
        """Add a tensor to save; of a tensor subclass, the tensors inside and its description."""
        check_key(key, group)
        try:
            self._add_checked(group, key, role, value, cast)
        except HoldfastError:
            if self.selection is None or self.selection.selects(self.kinds, self.aliases, group, key):
                raise
            self.left_out.append(group)

    def _add_checked(self, group: str, key: str, role: str, value: StateTensor, cast: DType | None) -> None:
        by_coordinate = (group, key) in self.by_coordinate
        if isinstance(value, torch.Tensor) and is_subclass(value):
            self._add_subclass(
                group, key, role, view_subclass(value, key, f"{group}: {key}", by_coordinate=by_coordinate)
            )
            return
        if by_coordinate:
            self._add_inner(group, key, role, own_shard(value, key, f"{group}: {key}"))
            return
        holder = self.holders.of(value, f"{group}: {key}")
        source = weakref.ref(value) if isinstance(value, torch.Tensor) else None
        self.items.append(SaveItem(group, key, role, holder, cast, source))

    def _add_subclass(self, group: str, key: str, role: str, view: SubclassView) -> None:
        known = self.subclasses.setdefault(group, {}).setdefault(key, view.description)
        if known != view.description:
            raise LayoutError(f"{group}: {key} are two tensors, {known} and {view.description}, which should be copies")
        for inner in view.inner:
            self._add_inner(group, key, role, inner)

    def _add_inner(self, group: str, key: str, role: str, inner: InnerTensor) -> None:
        check_key(inner.key, group)
        self.items.append(SaveItem(group, inner.key, role, inner.holder, None, weakref.ref(inner.tensor), key))

    def by_name(self) -> dict[tuple[str, str], list[SaveItem]]:
        """Return the items of each tensor, by group and key."""
        out: dict[tuple[str, str], list[SaveItem]] = {}
        for item in self.items:
            out.setdefault((item.group, item.key), []).append(item)
        return out

    def add_tree_tensors(self, labels: Mapping[str, str]) -> None:
        """Add the tensors inside values, under the coordinates along which the values differ between ranks."""
        for name, tree in self.trees.items():
            for key, tensor in tree.tensors.items():
                self.add(name, key_at(key, labels.get(name, "")), "value", tensor)

    def value_reports(self, partitioned: Collection[str], *, on_devices: bool = True) -> dict[str, RankValue]:
        """Return every value that is not a tensor, as this rank reports it to the other ranks.

        Comparing device tensors inside values synchronizes with the device; `on_devices=False` skips them.
        """
        out: dict[str, RankValue] = {}
        for name, tree in self.trees.items():
            own = self.partitioned_report(name) if name in partitioned else None
            content = [self.tree_kinds[name], tree.value]
            out[name] = own or RankValue.of(TREE, content, tensors_digest(tree, on_devices=on_devices))
        for name, content in self.optimizers.items():
            out[name] = RankValue.of(OPTIMIZER, content)
        for name, data in self.files.items():
            out[FILE_PREFIX + name] = RankValue.of(FILE, data.decode())
        for name, descriptions in self.subclasses.items():
            out[entry_name(name)] = RankValue.of(SUBCLASSES, descriptions)
        for name, plan in self.plans.items():
            out[PLAN_PREFIX + name] = RankValue.of(PLAN, plan)
        for name, base in self.bases.items():
            out[BASE_PREFIX + name] = RankValue.of(BASE_MODEL, base)
        return out

    def partitioned_report(self, name: str) -> RankValue | None:
        """Return the report of a dict whose keys may be partitioned over ranks, as pipeline stages do.

        None for a value that is neither a dict of tensors nor the extra states of a module.
        """
        kind, tree = self.tree_kinds[name], self.trees[name]
        plain = isinstance(tree.value, dict) and not any(key.startswith("$") for key in tree.value)
        if kind not in ("tensors", "module") or not plain:
            return None
        own = tensors_by_top_key(tree)
        digests = {key: item_digest(item, own.get(key, {})) for key, item in tree.value.items()}
        return RankValue.of(SPLIT_DICT, {"kind": kind, "value": tree.value, "digests": digests})


def collect(
    live: LiveState,
    model_dtype: str | None,
    holders: Holders | None = None,
    selection: Chooses | None = None,
    by_coordinate: frozenset[tuple[str, str]] = frozenset(),
) -> Collected:
    """Collect everything this rank holds; tensors of stateful objects follow once their axes are known.

    `holders` caches the layouts of tensors from earlier saves. What a `selection` leaves out need not be storable.
    `by_coordinate` are states that ranks quantize differently, by group and key.
    """
    out = Collected(
        owners=live.own_owners(),
        live_optimizers=dict(live.optimizers),
        holders=holders or Holders(),
        by_coordinate=by_coordinate,
        selection=selection,
    )
    target = model_dtype_named(model_dtype)
    for name in live.modules:
        _collect_module(out, live, name, target)
    for name, module in live.entries.items():
        _collect_entry(out, live, name, module, target)
    for name, optimizer in live.optimizers.items():
        if selection is not None and selection.drops(name, optimizer=True):
            continue
        _collect_optimizer(out, live, name, optimizer)
    out.fixed = len(out.items)
    for name in live.averages:
        _collect_averages(out, live, name)
    collect_values(out, live)
    return out


def collect_values(out: Collected, live: LiveState) -> None:
    """Collect the values that are neither modules nor optimizers."""
    chosen = {*live.trees, *live.statefuls, *live.values}
    if out.selection is not None:
        chosen = {name for name in chosen if not out.selection.drops(name, inside=name in live.trees)}
    for name, value in ((name, value) for name, value in live.trees.items() if name in chosen):
        tree = flatten(name, value)
        out.kinds[name] = "tensors"
        for key, tensor in tree.tensors.items():
            out.add(name, key, "value", tensor)
        out.trees[name], out.tree_kinds[name] = Tree(tree.value), "tensors"
    for name, stateful in ((name, value) for name, value in live.statefuls.items() if name in chosen):
        out.trees[name], out.tree_kinds[name] = flatten(name, stateful.state_dict()), "stateful"
    for name, value in ((name, value) for name, value in live.values.items() if name in chosen):
        out.trees[name], out.tree_kinds[name] = Tree(statejson.encode(value, name)), "json"


def _collect_module(out: Collected, live: LiveState, name: str, target: DType | None) -> None:
    view = live.modules[name]
    out.kinds[name] = view.kind
    out.aliases[name] = dict(view.ties)
    seen: set[tuple[str, object]] = set()
    for key, tensor in view.tensors.items():
        stored = view.stored_key(key)
        if (stored, memory_identity(tensor)) in seen:
            continue
        seen.add((stored, memory_identity(tensor)))
        role = "parameter" if key in view.parameters else "buffer"
        rounds = target is not None and role == "parameter" and tensor.dtype == torch.float32
        rounds = rounds and not is_subclass(tensor)  # its dtype is not that of the tensors inside
        out.add(name, stored, role, tensor, target if rounds else None)
        if rounds:
            out.kinds[masters_group(name)] = "masters"
            out.add(masters_group(name), stored, role, tensor)
    if view.extra:
        out.trees[name], out.tree_kinds[name] = flatten(name, dict(view.extra)), "module"


def _collect_entry(out: Collected, live: LiveState, name: str, module: Any, target: DType | None) -> None:
    """Collect the plan and the config files of a module in the state."""
    inner, parts = unwrap(module), live.parts.get(name)
    out.plans |= plan_of(name, inner)
    files = entry_files(name, inner, parts, target.name if target else None)
    quantized = [group for group in out.subclasses if out.subclasses[group] and group in (name, f"{name}.{BASE}")]
    if files and quantized:
        out.notices.append(_SUBCLASS_NOTICE.format(name=name, key=next(iter(out.subclasses[quantized[0]]))))
        files = {}
    out.files |= files
    if name == "model":
        kind = adapter_kind(inner)
        if kind and peft_model(inner) is None:
            out.notices.append(
                f"{name}: {kind} has PEFT adapters, so its keys differ from the plain model's: no config.json is "
                "written, and from_pretrained cannot open this checkpoint. holdfast.load can, into a model with the "
                "same adapters. For from_pretrained, save merge_and_unload(), or save the adapters with "
                "save_pretrained"
            )


_SUBCLASS_NOTICE = (
    "{name}: {key} is a tensor subclass, stored as the tensors inside: no config.json is written, and from_pretrained "
    "cannot open this checkpoint. holdfast.load can, into a model that was quantized in the same way"
)


def _collect_averages(out: Collected, live: LiveState, name: str) -> None:
    value = live.averages[name]
    averages = value.holdfast_averages()
    for group, view in live.averages_views(name).items():
        out.kinds[group] = view.kind
        out.aliases[group] = dict(view.ties)
        for key in view.tensors:
            tensor = averages.get(view.module_key(key))
            if tensor is not None:
                out.add(group, key, "state" if key in view.parameters else "buffer", tensor)
    out.trees[name], out.tree_kinds[name] = Tree(statejson.encode(value.holdfast_count(), name)), "averages"
    inner = unwrap(value.model)
    module = next((own for own, entry in live.entries.items() if unwrap(entry) is inner), "model")
    out.files |= entry_files(module, inner, live.parts.get(module), "float32", f"{name}/")


def _collect_optimizer(out: Collected, live: LiveState, name: str, optimizer: Any) -> None:
    if not isinstance(optimizer, DeclaresShards):
        check_optimizer_save(name, optimizer)
    module, key_of = live.parameter_keys(optimizer)
    view = view_optimizer(name, optimizer, key_of)
    out.kinds[name] = "optimizer"
    for key, value in view.tensors:
        if is_empty_beside_blocks(view.optimizer, value):
            continue
        if isinstance(value, DTensor) and is_low_bit(view.optimizer):
            out.quantized = out.quantized or MixedStates()
            out.quantized.note(name, key, is_quantized=is_subclass(value))
        out.add(name, key, "state", value)
    known_masters = {item.key for item in out.items if item.group == masters_group(module)}
    for key, value in view.masters:
        out.kinds[masters_group(module)] = "masters"
        if key not in known_masters:
            out.add(masters_group(module), key, "state", value)
    keys = [[key_of_param(name, param, key_of) for param in params] for params, _ in group_options(optimizer)]
    with_state = {key.rpartition("/")[0] for key, _ in view.tensors} | view.scalars.keys() | view.nested.keys()
    with_state |= {key for key, _ in view.masters}
    scalars = {key: statejson.encode(value, f"{name}[{key}]") for key, value in view.scalars.items()}
    for key, states in view.nested.items():
        scalars[key] = {**scalars.get(key, {}), **states}
    out.optimizers[name] = {
        "groups": option_groups(optimizer, name, keys),
        "stateless": [] if view.declared else [key for key, _ in view.params if key not in with_state],
        "scalars": scalars,
        "masters": view.master_name if view.masters else None,
    }
    if (spanned := spanned_params(optimizer, key_of, name)) is not None:
        out.optimizers[name]["spans"] = spanned
