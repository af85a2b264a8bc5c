"""Signatures such as "nc*, c -> nc*": the dims that may stay sharded, the cheapest placements, the sharded run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, ArgSlot, Call
from holdfast.spmd.base.torch_dispatch import global_outputs
from holdfast.spmd.base.torch_specs import local_box
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.shard_sizes import is_shard

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FIXED = "_"  # the letter of a dim that stays whole


@dataclass(frozen=True, slots=True)
class Signature:
    """A letter for each dim of each input and output.

    A `free` letter may be sharded: a result that has the letter is sharded too, and a result that lacks it is a partial
    sum. `same` lists results, by index and letter, that every shard of a letter computes whole. `sums` lists inputs
    that may be Partial together while the others are whole, and the results that are Partial then.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    free: str
    same: tuple[tuple[int, str], ...] = ()
    sums: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


@dataclass(frozen=True, slots=True)
class AxisChoice:
    """On one mesh axis: the placement of each input and each output."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class ChosenPlacements:
    """The placements, over all axes, of every input and output of a call."""

    call: Call
    signature: Signature
    inputs: tuple[tuple[Placement, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...]

    def size(self, letter: str) -> int:
        """Return the global length of the dims called `letter`."""
        for (_, tensor), letters in zip(self.call.tensor_args(), self.signature.inputs, strict=True):
            if letter in letters:
                return int(tensor.shape[letters.index(letter)])
        raise KeyError(letter)

    def is_sharded(self, letter: str) -> bool:
        return any(
            is_shard(placement) and letters[placement.dim] == letter
            for letters, placements in zip(self.signature.inputs, self.inputs, strict=True)
            for placement in placements
        )


LocalRun = Callable[[ChosenPlacements, dict[ArgSlot, torch.Tensor]], Any]


def parse(
    text: str,
    call: Call,
) -> Signature:
    """Parse a signature such as "nc*, c -> nc*, c".

    `*` stands for any number of unsharded dims. `+` before a tensor marks the linear arguments: if all of them
    are Partial, the results marked `+` are.
    """
    before, after = (_tensors(side) for side in text.split("->"))
    tensors = [tensor for _, tensor in call.tensor_args()]
    inputs = tuple(_expand(word.lstrip("+"), tensor.ndim) for word, tensor in zip(before, tensors, strict=True))
    outputs = tuple(word.lstrip("+") for word in after)
    letters = "".join(sorted({letter for word in inputs for letter in word if letter.isalpha()}))
    return Signature(inputs, outputs, letters, sums=(_marked(before), _marked(after)))


def _tensors(side: str) -> list[str]:
    return [word.strip() for word in side.split(",")]


def _marked(words: list[str]) -> tuple[int, ...]:
    return tuple(place for place, word in enumerate(words) if word.startswith("+"))


def _expand(word: str, dims: int) -> str:
    if "*" in word:
        return word.replace("*", FIXED * (dims - len(word) + 1))
    if len(word) != dims:
        raise ValueError(f"a tensor of {dims} dims where the rule says {word!r}")
    return word


def axis_choices(signature: Signature) -> Iterator[AxisChoice]:
    """Yield every choice for one mesh axis: each free letter, everything replicated, and the linear Partials."""
    for letter in signature.free:
        inputs = tuple(_shard(letters, letter, Replicate()) for letters in signature.inputs)
        outputs = tuple(
            _shard(letters, letter, Replicate() if (place, letter) in signature.same else Partial())
            for place, letters in enumerate(signature.outputs)
        )
        yield AxisChoice(inputs, outputs)
    yield AxisChoice(tuple(Replicate() for _ in signature.inputs), tuple(Replicate() for _ in signature.outputs))
    added, results = signature.sums
    if added:
        yield AxisChoice(_partial_at(added, len(signature.inputs)), _partial_at(results, len(signature.outputs)))


def _partial_at(places: tuple[int, ...], count: int) -> tuple[Placement, ...]:
    return tuple(Partial() if place in places else Replicate() for place in range(count))


def _shard(letters: str, letter: str, otherwise: Placement) -> Placement:
    return Shard(letters.index(letter)) if letter in letters else otherwise


def choose(call: Call, signature: Signature, share: bool = False) -> ChosenPlacements:
    """Return the cheapest choice on each axis; with `share`, axes that hold everything whole take part of the work."""
    tensors = [tensor for _, tensor in call.tensor_args()]
    order = range(call.mesh.ndim)
    picked = [min(axis_choices(signature), key=lambda way: _cost(tensors, way, axis, call)) for axis in order]
    if share and any(_cost(tensors, picked[axis], axis, call)[0] for axis in order):
        _share(picked, call, signature)
    return ChosenPlacements(
        call,
        signature,
        tuple(tuple(picked[axis].inputs[i] for axis in order) for i in range(len(signature.inputs))),
        tuple(tuple(picked[axis].outputs[i] for axis in order) for i in range(len(signature.outputs))),
    )


def _share(picked: list[AxisChoice], call: Call, signature: Signature) -> None:
    """On axes that hold everything whole, slice what can be sliced for free: then the other axes send less."""
    tensors = [tensor for _, tensor in call.tensor_args()]
    for axis, way in enumerate(picked):
        if any(is_shard(place) for place in way.inputs):
            continue
        for letter, other in zip(signature.free, axis_choices(signature), strict=False):
            if _is_shareable(letter, tensors, signature, axis, call):
                rest = [way for way in axis_choices(signature) if way != other]
                for number in (number for number, chosen in enumerate(picked) if chosen == other):
                    picked[number] = min(rest, key=lambda way: _cost(tensors, way, number, call))
                picked[axis] = other
                break


def _is_shareable(letter: str, tensors: list[torch.Tensor], signature: Signature, axis: int, call: Call) -> bool:
    """Return True if all ranks of an axis have the dims of a letter whole, and can divide them evenly."""
    for tensor, word in zip(tensors, signature.inputs, strict=True):
        if letter not in word:
            continue
        dim, ranks = word.index(letter), call.mesh.size(axis)
        placements = tensor.placements if isinstance(tensor, DTensor) else ()
        if not tensor.shape[dim] or tensor.shape[dim] % ranks or Shard(dim) in placements:
            return False
        if placements and not placements[axis].is_replicate():
            return False
    return True


def _cost(tensors: Sequence[torch.Tensor], way: AxisChoice, axis: int, call: Call) -> tuple[float, int]:
    """Return the bytes moved, then the number of placements that change."""
    moved_bytes, changes = 0.0, 0
    joined = [_place(tensor, axis) for tensor in tensors]
    for tensor, wanted in zip(tensors, way.inputs, strict=True):
        present = _place(tensor, axis)
        if present == wanted:
            continue
        changes += 1
        if not present.is_replicate() and wanted.is_partial():
            return float("inf"), changes
        sizes, later = _held_sizes(tensor, wanted, axis, call)
        cost = _received(present, wanted, sizes, later, call.mesh.size(axis), call.mesh.device_type == "cpu")
        if present.is_partial() and is_shard(wanted) and wanted not in joined:
            size, ranks = sizes[wanted.dim], call.mesh.size(axis)
            has_empty = size <= -(-size // ranks) * (ranks - 1)
            cost *= 2 if has_empty else 1  # later uses gather the other shards
        moved_bytes += cost * tensor.element_size()
    return moved_bytes, changes


def _place(tensor: torch.Tensor, axis: int) -> Placement:
    return tensor.placements[axis] if isinstance(tensor, DTensor) else Replicate()


def _held_sizes(tensor: torch.Tensor, wanted: Placement, axis: int, call: Call) -> tuple[list[int], int]:
    """Return the largest sizes that the other axes leave to a rank, and the ranks whose shards are gathered first.

    These are the ranks of later axes that shard the dim which this axis will shard: axes shard in order.
    """
    sizes, later = list(tensor.shape), 1
    for number, place in enumerate(tensor.placements if isinstance(tensor, DTensor) else ()):
        if number == axis or not is_shard(place):
            continue
        if number > axis and place == wanted:
            later *= call.mesh.size(number)
        else:
            sizes[place.dim] = -(-sizes[place.dim] // call.mesh.size(number))
    return sizes, later


def _received(present: Placement, wanted: Placement, sizes: list[int], later: int, ranks: int, gathers: bool) -> float:
    """Return the padded elements that a rank receives on one axis; all if torch `gathers` to exchange shards."""
    sizes, share = list(sizes), (ranks - 1) / ranks
    if is_shard(wanted):
        sizes[wanted.dim] = -(-sizes[wanted.dim] // ranks) * ranks
    if (dim := getattr(present, "dim", None)) is not None:
        sizes[dim] = -(-sizes[dim] // ranks)
    numbers = math.prod(sizes)
    before = numbers * (later - 1) / later
    if present.is_replicate():
        return before
    if present.is_partial():
        return before + numbers * share * (1 if is_shard(wanted) else 2)
    return before + numbers * (share if is_shard(wanted) and not gathers else ranks - 1)


def run_sharded(
    call: Call, signature: Signature, local: LocalRun | None = None, *, skip_empty: bool = True, share: bool = False
) -> Any:
    """Redistribute the inputs as the signature allows, run on the local tensors, and wrap the results.

    `skip_empty=False` calls `local` on empty shards too, as it must be if it communicates. `share` is as in `choose`.
    """
    chosen = choose(call, signature, share)
    slots = list(call.tensor_args())
    tensors = {
        slot: local_part(tensor, placements, call.mesh)
        for (slot, tensor), placements in zip(slots, chosen.inputs, strict=True)
    }
    pairs = zip(tensors.values(), (tensor for _, tensor in slots), strict=True)
    empty = [part for part, tensor in pairs if part.numel() == 0 and tensor.numel()]
    if skip_empty and empty:
        return _results_of_empty(chosen, empty[0].device)
    result = call.run(tensors) if local is None else local(chosen, tensors)
    return _wrapped(chosen, result)


def _results_of_empty(chosen: ChosenPlacements, device: torch.device) -> Any:
    """Return the results of a rank with an empty shard: empty shards, and zeros for partial sums."""
    metas = global_outputs(chosen.call.info)
    several = not hasattr(metas, "dtype")
    results: list[Any] = []
    for meta, placements in zip(metas if several else [metas], chosen.outputs, strict=False):
        if meta is None:
            results.append(None)
            continue
        sizes, _ = local_box(meta.shape, chosen.call.mesh, placements)
        local = torch.zeros(sizes, dtype=meta.dtype, device=device)
        results.append(wrap(local, chosen.call.mesh, placements, meta.shape))
    return tuple(results) if several else results[0]


def _wrapped(chosen: ChosenPlacements, result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return _wrap_one(chosen, result, 0)
    wrapped = [
        _wrap_one(chosen, item, place) if isinstance(item, torch.Tensor) else item for place, item in enumerate(result)
    ]
    return wrapped if isinstance(result, list) else tuple(wrapped)


def _wrap_one(chosen: ChosenPlacements, local: torch.Tensor, place: int) -> DTensor:
    placements, letters = chosen.outputs[place], chosen.signature.outputs[place]
    shape = list(local.shape)
    for placement in placements:
        if is_shard(placement):
            shape[placement.dim] = chosen.size(letters[placement.dim])
    return wrap(local, chosen.call.mesh, placements, shape)


def broadcast_signature(call: Call, outputs: int) -> Signature:
    """Return the letters of tensors that broadcast together: dims align at the right; dims of size 1 stay whole."""
    tensors = [tensor for _, tensor in call.tensor_args()]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    letters = LETTERS[: len(shape)]
    inputs = []
    for tensor in tensors:
        own = letters[len(letters) - tensor.ndim :] if tensor.ndim else ""
        inputs.append(
            "".join(
                FIXED if size == 1 and shape[place - tensor.ndim] != 1 else letter
                for place, (letter, size) in enumerate(zip(own, tensor.shape, strict=True))
            )
        )
    return Signature(tuple(inputs), (letters,) * outputs, letters)


def signature_rule(text: str) -> Callable[[Call], Any]:
    """Return the rule of a signature text; calls with other numbers of dims are left to torch."""
    words = [word.strip(" +") for word in text.partition("->")[0].split(",")]
    plain = text.replace("*", "_")

    def run(call: Call) -> Any:
        tensors = [tensor for _, tensor in call.tensor_args()]
        if [tensor.ndim for tensor in tensors] != [len(word) for word in words] or not _shards_a_letter(tensors, words):
            return run_sharded(call, parse(plain, call)) if "shuffle" in call.op._schema.name else USE_TORCH
        return run_sharded(call, parse(plain, call))

    return run


def _shards_a_letter(tensors: list[Any], words: list[str]) -> bool:
    """Return True if some tensor is sharded along a letter."""
    return any(
        is_shard(place) and word[place.dim] != "*"
        for tensor, word in zip(tensors, words, strict=True)
        if isinstance(tensor, DTensor)
        for place in tensor.placements
    )
