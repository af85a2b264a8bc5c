"""Random states, pairs of one structure, and an exact comparison of everything in them."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

FLOATS = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn"]
DTYPES = [*FLOATS, "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "bool", "complex64", "complex128"]
ARRAYS = [*("float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
          *("bool", "complex64", "complex128")]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spec:
    """A node of a structure: a tensor or array, a container, or a plain value that any value may replace."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    items: dict[Any, Spec] = field(default_factory=dict)

    def leaves(self) -> Iterator[Spec]:
        if self.kind in ("tensor", "array"):
            yield self
        for item in self.items.values():
            yield from item.leaves()


def random_spec(rng: random.Random, depth: int) -> Spec:
    kind = rng.choice(["tensor", "array", "plain", "plain", "dict", "list", "tuple", "ordered", "keyed"])
    if depth == 0 and kind not in ("tensor", "array"):
        kind = "plain"
    if kind in ("tensor", "array"):
        return leaf_spec(rng, kind)
    names: list[Any] = [f"k{number}" for number in range(rng.randint(0, 3))]
    if kind in ("list", "tuple"):
        names = list(range(len(names)))
    if kind == "keyed":
        names = rng.sample([0, -3, None, 2.5, ("a", 1), "$tag", b"x", "t"], len(names))
    return Spec(kind, items={name: random_spec(rng, depth - 1) for name in names if kind != "plain"})


def leaf_spec(rng: random.Random, kind: str) -> Spec:
    shape = tuple(rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(rng.randint(0, 3)))
    return Spec(kind, rng.choice(DTYPES if kind == "tensor" else ARRAYS), shape)


def fill(spec: Spec, rng: random.Random, *, live: bool) -> Any:
    """A value of the structure; a `live` one has other plain values, and more or fewer of them."""
    if spec.kind == "tensor":
        return random_tensor(spec, rng, live=live)
    if spec.kind == "array":
        return random_array(spec, rng, live=live)
    if spec.kind == "plain":
        return random_plain(rng, 2)
    items = {name: fill(item, rng, live=live) for name, item in spec.items.items()}
    if spec.kind in ("list", "tuple"):
        values = list(items.values())
        if live:
            fixed = max((index + 1 for index, item in spec.items.items() if any(item.leaves())), default=0)
            values = values[: rng.randint(fixed, len(values))] + [random_plain(rng, 1)] * rng.randint(0, 2)
        as_list = spec.kind == "list" if not live or rng.random() < 0.8 else spec.kind != "list"
        return values if as_list else tuple(values)
    if live:
        items = {name: value for name, value in items.items() if any(spec.items[name].leaves()) or rng.random() < 0.7}
        items |= {f"stale{number}": random_plain(rng, 1) for number in range(rng.choice([0, 0, 1, 2]))}
        items = dict(rng.sample(list(items.items()), len(items)))
    return OrderedDict(items) if spec.kind == "ordered" else items


def random_plain(rng: random.Random, depth: int) -> Any:
    simple = [
        *(None, True, False, 0, -7, 1 << 70, 0.5, -0.0, math.inf, -math.inf, math.nan, "", "é\n", b"\0\xff", 1 + 2j),
        *(complex(math.nan, -0.0), bytearray(b"ab"), np.float32(1.5), np.int8(-3), np.bool_(True)),
        *(np.float64(math.nan), np.complex64(1j), {1, 2}, frozenset({"a", (1, 2)}), set(), Counter("aab")),
        torch.Size([2, 3]),
    ]
    if depth == 0 or rng.random() < 0.6:
        return rng.choice(simple)
    values = [random_plain(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return rng.choice([values, tuple(values), {f"p{i}": v for i, v in enumerate(values)}, dict(enumerate(values))])


def random_bytes(rng: random.Random, count: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(rng.randbytes(count), np.uint8).copy()


def random_tensor(spec: Spec, rng: random.Random, *, live: bool) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    count = math.prod(spec.shape)
    raw = torch.from_numpy(random_bytes(rng, count * dtype.itemsize))
    flat = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype) if count else torch.empty(0, dtype=dtype)
    whole = flat.reshape(spec.shape)
    layout = rng.choice(["plain", "transposed", "strided", "offset"])
    if layout == "transposed":
        backwards = tuple(reversed(range(whole.ndim)))
        whole = whole.permute(backwards).contiguous().permute(backwards)
    elif layout == "strided" and whole.ndim:
        base = torch.zeros([2 * size for size in spec.shape], dtype=dtype)
        view = base[tuple(slice(None, None, 2) for _ in spec.shape)]
        whole = view.copy_(whole)
    elif layout == "offset":
        base = torch.zeros(count + 3, dtype=dtype)
        base[2 : 2 + count] = whole.reshape(-1)
        whole = base[2 : 2 + count].view(spec.shape)
    elif not live and whole.is_complex() and rng.random() < 0.5:
        whole = whole.conj()
    if live and whole.is_floating_point() and whole.dtype.itemsize > 1 and rng.random() < 0.2:
        whole.requires_grad_()
    return whole


def random_array(spec: Spec, rng: random.Random, *, live: bool) -> np.ndarray[Any, Any]:
    dtype = np.dtype(spec.dtype)
    raw = random_bytes(rng, math.prod(spec.shape) * dtype.itemsize)
    whole = (raw % 2).astype(bool).reshape(spec.shape) if spec.dtype == "bool" else raw.view(dtype).reshape(spec.shape)
    layout = rng.choice(["plain", "fortran", "reversed", "swapped", "frozen", "strided"])
    if layout == "fortran":
        return np.asfortranarray(whole) if whole.ndim else whole
    if layout == "reversed" and whole.ndim:
        return whole[::-1]
    if layout == "swapped":
        return whole.astype(dtype.newbyteorder(">"))
    if layout == "strided" and whole.ndim:
        base = np.zeros([2 * size for size in spec.shape], dtype)
        base[tuple(slice(None, None, 2) for _ in spec.shape)] = whole
        return base[tuple(slice(None, None, 2) for _ in spec.shape)]
    whole.flags.writeable = layout != "frozen" or not live
    return whole


class Derived(nn.Module):
    """A module with everything that a load must see to: buffers, a tie, extra state, a derived value."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.inner = nn.Linear(3, 3)
        self.inner.tied = self.inner.weight
        self.register_buffer("gone", torch.zeros(2), persistent=False)
        array = random_array(Spec("array", "float32", (2,)), rng, live=False)
        self.note = {"plain": random_plain(rng, 1), "array": array}
        self.twice = torch.zeros(3)
        for tensor in (*self.parameters(), *self.norm.buffers()):
            raw = random_bytes(rng, tensor.numel() * tensor.element_size())
            tensor.data.copy_(torch.from_numpy(raw).view(tensor.dtype).reshape(tensor.shape))
        self.register_load_state_dict_post_hook(Derived.derive)

    def derive(self, keys: Any = None) -> None:
        self.twice = self.inner.bias.detach() * 2

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


class Keeper:
    """A stateful object with a random tree in it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def random_optimizer(rng: random.Random, kind: str, module: nn.Module) -> torch.optim.Optimizer:
    makers = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}
    optimizer = makers[kind](module.parameters(), lr=rng.random())
    for _ in range(rng.randint(0, 2)):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rng.randint(0, 99)))
        optimizer.step()
    return optimizer


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A structure of a whole state: trees by name, and which objects stand beside them."""

    trees: dict[str, Spec]
    statefuls: dict[str, Spec]
    module: bool
    optimizer: str

    @staticmethod
    def drawn(rng: random.Random) -> StateSpec:
        trees = {f"tree{number}": random_spec(rng, 3) for number in range(rng.randint(1, 3))}
        statefuls = {f"object{number}": random_spec(rng, 2) for number in range(rng.choice([0, 0, 1]))}
        module = rng.random() < 0.25
        return StateSpec(trees, statefuls, module, rng.choice(["", "sgd", "adamw", "adagrad"]) if module else "")

    def fill(self, rng: random.Random, *, live: bool) -> dict[str, Any]:
        state: dict[str, Any] = {name: fill(spec, rng, live=live) for name, spec in self.trees.items()}
        for name, spec in self.statefuls.items():
            state[name] = Keeper(fill(spec, rng, live=False) if not live else random_plain(rng, 1))
        if self.module:
            state["model"] = Derived(rng)
        if self.optimizer:
            state["optimizer"] = random_optimizer(rng, self.optimizer, state["model"])
        return state

    def tensors(self) -> int:
        return sum(1 for spec in self.trees.values() for _ in spec.leaves())


def canonical(value: Any) -> Any:
    """A value as plain tuples of exact bits and types: equal if and only if the values are."""
    if isinstance(value, Derived):
        tensors = {key: canonical(tensor) for key, tensor in value.state_dict().items() if "extra" not in key}
        return "module", tuple(sorted(tensors.items())), canonical(value.note)
    if isinstance(value, torch.optim.Optimizer):
        params = [param for group in value.param_groups for param in group["params"]]
        states = [canonical(dict(sorted(value.state[p].items()))) if value.state.get(p) else None for p in params]
        options = [canonical({k: v for k, v in group.items() if k != "params"}) for group in value.param_groups]
        return "optimizer", tuple(states), tuple(options)
    if isinstance(value, Keeper):
        return "keeper", canonical(value.value)
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), tensor_bits(value)
    if isinstance(value, np.ndarray):
        native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
        return "array", native.dtype.name, value.shape, native.tobytes()
    if isinstance(value, dict):
        pairs = [(canonical(key), canonical(item)) for key, item in value.items()]
        return type(value).__name__, tuple(pairs if isinstance(value, OrderedDict) else sorted(pairs, key=repr))
    if isinstance(value, list | tuple):
        return "list" if isinstance(value, list) else "tuple", tuple(map(canonical, value))
    if isinstance(value, set | frozenset):
        return type(value).__name__, tuple(sorted(map(canonical, value), key=repr))
    if isinstance(value, np.generic):
        return type(value).__name__, value.tobytes()
    if isinstance(value, float):
        return "float", struct.pack("d", value)
    if isinstance(value, complex):
        return "complex", struct.pack("dd", value.real, value.imag)
    return type(value).__name__, repr(value)


def tensor_bits(tensor: torch.Tensor) -> bytes:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1)
    return whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def leaves_by_path(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every tensor and array of a tree with the keys that lead to it."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves_by_path(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves_by_path(item, (*path, index))
