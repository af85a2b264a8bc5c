"""Saving: what this rank can offer of each tensor, and the values that are not tensors."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.adapters.huggingface import adapter_kind, config_files
from holdfast.adapters.live_state import LiveState
from holdfast.adapters.loading.load_hooks import check_optimizer_save
from holdfast.adapters.module import memory_identity, view_module
from holdfast.adapters.optimizer import DeclaresShards, StateTensor, group_options, key_of_param, view_optimizer
from holdfast.adapters.tensors import Holder, Holders, fingerprint, holder_of, part_view, raw_array
from holdfast.adapters.tree import Tree, flatten
from holdfast.core.errors import Unsupported
from holdfast.format import statejson
from holdfast.format.dtypes import DType, dtype_named, model_dtype_named
from holdfast.format.names import check_key, masters_group
from holdfast.layout.box import Box
from holdfast.layout.coordinates import key_at
from holdfast.layout.placement import ShardBox
from holdfast.plan.arrays import RawArray
from holdfast.plan.files import Place
from holdfast.plan.state_values import FILE, FILE_PREFIX, OPTIMIZER, PLAN, PLAN_PREFIX, SPLIT_DICT, TREE, RankValue

_CACHED_TENSORS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A tensor this rank holds a part of: under which group and key, and in what role.

    `cast` is the dtype it is rounded to on its way into the file; `source` is the live tensor.
    """

    group: str
    key: str
    role: str  # "parameter", "buffer", "state" or "value"
    holder: Holder
    cast: DType | None = None
    source: weakref.ref[torch.Tensor] | None = None

    @property
    def stored(self) -> DType:
        return self.cast or self.holder.stored

    @property
    def logical(self) -> DType:
        return self.cast or self.holder.logical


@dataclass(slots=True)
class Collected:
    """One rank's state, ready to be planned."""

    offers: list[Offer] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    trees: dict[str, Tree] = field(default_factory=dict)
    tree_kinds: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    plans: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, list[str]] = field(default_factory=dict)
    live_optimizers: list[Any] = field(default_factory=list)
    holders: Holders = field(default_factory=Holders)
    notices: list[str] = field(default_factory=list)  # what the user should know of this state
    fixed: int = 0  # how many of the offers are of modules and optimizers

    def signature(self) -> Any:
        """Equal as long as this rank holds the same tensors in the same way."""
        offers = [
            (o.group, o.key, o.role, o.logical.name, o.holder.shape, o.holder.parts, o.holder.local.device)
            for o in self.offers
        ]
        return offers, dict(self.kinds), dict(self.aliases), dict(self.owners)

    def offer(self, group: str, key: str, role: str, value: StateTensor, cast: DType | None = None) -> None:
        check_key(key, group)
        holder = self.holders.of(value, f"{group}: {key}")
        source = weakref.ref(value) if isinstance(value, torch.Tensor) else None
        self.offers.append(Offer(group, key, role, holder, cast, source))

    def by_name(self) -> dict[tuple[str, str], list[Offer]]:
        """The offers of each tensor, by group and key."""
        out: dict[tuple[str, str], list[Offer]] = {}
        for offer in self.offers:
            out.setdefault((offer.group, offer.key), []).append(offer)
        return out

    def offer_trees(self, labels: Mapping[str, str]) -> None:
        """Offer the tensors of values, under the coordinates at which they differ from other ranks'."""
        for name, tree in self.trees.items():
            for key, tensor in tree.tensors.items():
                self.offer(name, key_at(key, labels.get(name, "")), "value", tensor)

    def told(self, dealt: Collection[str], *, on_devices: bool = True) -> dict[str, RankValue]:
        """Everything that is not a tensor, as this rank tells it to the others.

        Comparing tensors inside of values that lie on a device takes a wait for the device;
        `on_devices=False` leaves them out.
        """
        out: dict[str, RankValue] = {}
        for name, tree in self.trees.items():
            own = self.told_dealt(name) if name in dealt else None
            content = [self.tree_kinds[name], tree.value]
            out[name] = own or RankValue.of(TREE, content, _tensors_digest(tree, on_devices=on_devices))
        for name, content in self.optimizers.items():
            out[name] = RankValue.of(OPTIMIZER, content)
        for name, data in self.files.items():
            out[FILE_PREFIX + name] = RankValue.of(FILE, data.decode())
        for name, plan in self.plans.items():
            out[PLAN_PREFIX + name] = RankValue.of(PLAN, plan)
        return out

    def told_dealt(self, name: str) -> RankValue | None:
        """A dict of tensors or extra states, whose keys may be dealt to ranks as a pipeline deals modules."""
        kind, tree = self.tree_kinds[name], self.trees[name]
        plain = isinstance(tree.value, dict) and not any(key.startswith("$") for key in tree.value)
        if kind not in ("tensors", "module") or not plain:
            return None
        own = _by_top_key(tree)
        digests = {key: _item_digest(item, own.get(key, {})) for key, item in tree.value.items()}
        return RankValue.of(SPLIT_DICT, {"kind": kind, "value": tree.value, "digests": digests})


def _by_top_key(tree: Tree) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors below each key of a dict; keys may have dots in them, so that one may be below several."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in tree.tensors.items():
        end = len(path)
        while end >= 0:
            if path[:end] in tree.value:
                out.setdefault(path[:end], {})[path] = tensor
            end = path.rfind(".", 0, end)
    return out


def _item_digest(item: Any, tensors: dict[str, torch.Tensor]) -> str:
    """Equal on ranks that have the same under a key of a dict. What a mere reference says needs no hash."""
    if not tensors and type(item) is dict and len(item) == 1:
        ((tag, content),) = item.items()
        if tag == "$tensor" and type(content) is str:
            return f"{tag} {content}"
    return RankValue.of(TREE, item, _tensors_digest(Tree(item, tensors), on_devices=True)).digest


def collect(live: LiveState, model_dtype: str | None, holders: Holders | None = None) -> Collected:
    """List everything this rank holds; tensors of stateful objects follow once their axes are known.

    `holders` spares looking again at tensors that were seen before.
    """
    out = Collected(
        owners=live.own_owners(), live_optimizers=list(live.optimizers.values()), holders=holders or Holders()
    )
    target = model_dtype_named(model_dtype)
    for name in live.modules:
        _collect_module(out, live, name, target)
    for name, optimizer in live.optimizers.items():
        _collect_optimizer(out, live, name, optimizer)
    out.fixed = len(out.offers)
    for name in live.averages:
        _collect_averages(out, live, name)
    collect_values(out, live)
    return out


def collect_values(out: Collected, live: LiveState) -> None:
    """List what is in neither modules nor optimizers."""
    for name, value in live.trees.items():
        tree = flatten(name, value)
        out.kinds[name] = "tensors"
        for key, tensor in tree.tensors.items():
            out.offer(name, key, "value", tensor)
        out.trees[name], out.tree_kinds[name] = Tree(tree.value), "tensors"
    for name, stateful in live.statefuls.items():
        out.trees[name], out.tree_kinds[name] = flatten(name, stateful.state_dict()), "stateful"
    for name, value in live.values.items():
        out.trees[name], out.tree_kinds[name] = Tree(statejson.encode(value, name)), "json"


def _collect_module(out: Collected, live: LiveState, name: str, target: DType | None) -> None:
    view = live.modules[name]
    out.kinds[name] = "module"
    out.aliases[name] = dict(view.ties)
    seen: set[tuple[str, object]] = set()
    for key, tensor in view.tensors.items():
        stored = view.stored_key(key)
        if (stored, memory_identity(tensor)) in seen:
            continue
        seen.add((stored, memory_identity(tensor)))
        role = "parameter" if key in view.parameters else "buffer"
        rounds = target is not None and role == "parameter" and tensor.dtype == torch.float32
        out.offer(name, stored, role, tensor, target if rounds else None)
        if rounds:
            out.kinds[masters_group(name)] = "masters"
            out.offer(masters_group(name), stored, role, tensor)
    if view.extra:
        out.trees[name], out.tree_kinds[name] = flatten(name, dict(view.extra)), "module"
    out.plans |= plan_of(name, view.module)
    if name == "model":
        out.files |= model_files(view.module, target.name if target else None)
        kind = adapter_kind(view.module)
        if kind:
            out.notices.append(
                f"{name}: {kind} has PEFT adapters, so that its keys are not those of the plain model: no "
                "config.json is written, and from_pretrained does not open this checkpoint. holdfast.load does, into "
                "a model with the same adapters. For from_pretrained save merge_and_unload(), or the adapters "
                "with save_pretrained"
            )


def plan_of(name: str, module: Any) -> dict[str, Any]:
    """The plan by which `holdfast.spmd.distribute` placed a module, as JSON values, under the module's name."""
    plan = getattr(module, "holdfast_plan", None)
    return {name: plan} if isinstance(plan, dict) else {}


def model_files(module: Any, model_dtype: str | None) -> dict[str, bytes]:
    """The config files of a model that is stored as `model_dtype`, or as it is."""
    target = model_dtype_named(model_dtype)
    return config_files(module, target.name if target else None)


def _collect_averages(out: Collected, live: LiveState, name: str) -> None:
    value, group = live.averages[name], live.averages_group(name)
    view = view_module(name, value.model, {})
    out.kinds[group] = "module"
    out.aliases[group] = dict(view.ties)
    for key, tensor in value.holdfast_averages().items():
        out.offer(group, key, "state" if key in view.parameters else "buffer", tensor)
    out.trees[name], out.tree_kinds[name] = Tree(statejson.encode(value.holdfast_count(), name)), "averages"
    if group == f"{name}/model":
        files = config_files(view.module, "float32")
        out.files |= {f"{name}/{file}": data for file, data in files.items()}


def _collect_optimizer(out: Collected, live: LiveState, name: str, optimizer: Any) -> None:
    if not isinstance(optimizer, DeclaresShards):
        check_optimizer_save(name, optimizer)
    module, key_of = live.parameter_keys(optimizer)
    view = view_optimizer(name, optimizer, key_of)
    out.kinds[name] = "optimizer"
    for key, value in view.tensors:
        out.offer(name, key, "state", value)
    already = {offer.key for offer in out.offers if offer.group == masters_group(module)}
    for key, value in view.masters:
        out.kinds[masters_group(module)] = "masters"
        if key not in already:
            out.offer(masters_group(module), key, "state", value)
    keys = [[key_of_param(name, param, key_of) for param in params] for params, _ in group_options(optimizer)]
    with_state = {key.rpartition("/")[0] for key, _ in view.tensors} | set(view.scalars)
    with_state |= {key for key, _ in view.masters}
    out.optimizers[name] = {
        "groups": option_groups(optimizer, name, keys),
        "stateless": [] if view.declared else [key for key, _ in view.params if key not in with_state],
        "scalars": {key: statejson.encode(value, f"{name}[{key}]") for key, value in view.scalars.items()},
        "masters": view.master_name if view.masters else None,
    }


def option_groups(optimizer: Any, name: str, keys: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The param groups of an optimizer, given the keys of their parameters."""
    return [
        {"params": list(own), "options": encode_options(options, f"{name}.param_groups[{index}]")}
        for index, ((_, options), own) in enumerate(zip(group_options(optimizer), keys, strict=True))
    ]


def encode_options(options: Mapping[str, Any], path: str) -> Any:
    """A param group's options; 0-d tensors such as a capturable learning rate keep their bits."""

    def claim(value: Any, where: str, keys: statejson.Keys) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if value.ndim:
            raise Unsupported(f"{where}: an option that is a tensor of shape {list(value.shape)} cannot be stored")
        array = raw_array(value.detach().cpu())
        return {"$option": [str(value.dtype).removeprefix("torch."), array.tobytes().hex()]}

    return statejson.encode(dict(options), path, claim)


def decode_options(options: Any, where: str) -> dict[str, Any]:
    def make(tag: str, content: Any) -> Any:
        if tag != "$option":
            raise Unsupported(f"{where}: the unknown tag {tag[:40]!r}")
        name, data = content
        dtype = getattr(torch, dtype_named(name).name)
        return torch.frombuffer(bytearray.fromhex(data), dtype=dtype)[0].clone()

    decoded = statejson.decode(options, where, make)
    return dict(decoded)


def _tensors_digest(tree: Tree, *, on_devices: bool) -> str:
    """Equal on ranks whose tensors inside a value are equal."""
    parts = []
    for key, tensor in sorted(tree.tensors.items()):
        holder = holder_of(tensor, key)
        parts.append(f"{key}:{holder.logical.name}:{list(holder.shape)}")
        whole = len(holder.parts) == 1 and holder.parts[0].box == Box.full(holder.shape)
        if whole and (on_devices or holder.local.device.type == "cpu"):
            parts.append(fingerprint(holder.local))
    return "\n".join(parts)


class LiveSources:
    """The bytes of this rank's shards by place, read from live tensors without copies where possible."""

    def __init__(self, offers: Mapping[tuple[str, str], list[Offer]], group_of: Mapping[str, str]) -> None:
        self._offers = offers
        self._group_of = group_of
        self._cache: OrderedDict[tuple[int, Box], RawArray] = OrderedDict()

    def array(self, place: Place, held: Box) -> RawArray:
        for offer, part in self._parts(place):
            if part.box == held:
                return self._array(offer, part)
        raise AssertionError(f"{place.spec.key}: the plan names a shard that this rank does not hold")

    def _parts(self, place: Place) -> Iterator[tuple[Offer, ShardBox]]:
        for offer in self._offers[self._group_of[place.file], place.spec.key]:
            for part in offer.holder.parts:
                yield offer, part

    def _array(self, offer: Offer, part: ShardBox) -> RawArray:
        if offer.cast is None and offer.holder.local.device.type == "cpu":
            return raw_array(part_view(offer.holder, part))
        # Blocks come in file order, so the tensors used last are the ones used next.
        address = (id(offer), part.box)
        if address not in self._cache:
            view = stored_view(offer, part).to("cpu")
            self._cache[address] = raw_array(view)
            while len(self._cache) > _CACHED_TENSORS:
                self._cache.popitem(last=False)
        return self._cache[address]


def stored_view(offer: Offer, part: ShardBox) -> torch.Tensor:
    """A part with the values it has in the file, still on its device."""
    view = part_view(offer.holder, part)
    return view.to(getattr(torch, offer.cast.name)) if offer.cast else view
