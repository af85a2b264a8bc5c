"""From letters to placements: which dims of a call may stay sharded, chosen axis by axis for the fewest bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call, Spot, is_shard, moved, wrap

FIXED = "_"  # the letter of a dim that may not be sharded


@dataclass(frozen=True, slots=True)
class Signature:
    """A letter for each dim of each tensor that goes in or comes out.

    A `free` letter may be sharded: a result that has it is sharded too, and one that lacks it is a sum over the
    shards. `same` names results, by place and letter, that every shard of a letter that they lack has whole.
    `sums` names inputs that may be Partial all together, the others being whole, and the results that then are.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    free: str
    same: tuple[tuple[int, str], ...] = ()
    sums: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


@dataclass(frozen=True, slots=True)
class Way:
    """On one mesh axis: the placement of each tensor that goes in, and of each that comes out."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The placements, over all axes, of every input and output of a call."""

    call: Call
    signature: Signature
    inputs: tuple[tuple[Placement, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...]

    def size(self, letter: str) -> int:
        """The length, on one device, of the dims called `letter`."""
        for (_, tensor), letters in zip(self.call.spots(), self.signature.inputs, strict=True):
            if letter in letters:
                return int(tensor.shape[letters.index(letter)])
        raise KeyError(letter)

    def is_sharded(self, letter: str) -> bool:
        return any(
            is_shard(placement) and letters[placement.dim] == letter
            for letters, placements in zip(self.signature.inputs, self.inputs, strict=True)
            for placement in placements
        )


Local = Callable[[Chosen, dict[Spot, torch.Tensor]], Any]


def parse(
    text: str,
    call: Call,
) -> Signature:
    """The signature that a text like "nc*, c -> nc*, c" says.

    `*` stands for any number of dims that stay whole, `+` before a tensor for the linear part of the operator: where
    all that have it are Partial, the results that have it are.
    """
    before, after = (_words(side) for side in text.split("->"))
    tensors = [tensor for _, tensor in call.spots()]
    inputs = tuple(_expand(word.lstrip("+"), tensor.ndim) for word, tensor in zip(before, tensors, strict=True))
    outputs = tuple(word.lstrip("+") for word in after)
    letters = "".join(sorted({letter for word in inputs for letter in word if letter.isalpha()}))
    return Signature(inputs, outputs, letters, sums=(_marked(before), _marked(after)))


def _words(side: str) -> list[str]:
    return [word.strip() for word in side.split(",")]


def _marked(words: list[str]) -> tuple[int, ...]:
    return tuple(place for place, word in enumerate(words) if word.startswith("+"))


def _expand(word: str, dims: int) -> str:
    if "*" in word:
        return word.replace("*", FIXED * (dims - len(word) + 1))
    if len(word) != dims:
        raise ValueError(f"a tensor of {dims} dims where the rule says {word!r}")
    return word


def ways_of(signature: Signature) -> Iterator[Way]:
    """Every way to run on one mesh axis; near the last, to have everything everywhere."""
    for letter in signature.free:
        inputs = tuple(_shard(letters, letter, Replicate()) for letters in signature.inputs)
        outputs = tuple(
            _shard(letters, letter, Replicate() if (place, letter) in signature.same else Partial())
            for place, letters in enumerate(signature.outputs)
        )
        yield Way(inputs, outputs)
    yield Way(tuple(Replicate() for _ in signature.inputs), tuple(Replicate() for _ in signature.outputs))
    added, results = signature.sums
    if added:
        yield Way(_partial_at(added, len(signature.inputs)), _partial_at(results, len(signature.outputs)))


def _partial_at(places: tuple[int, ...], count: int) -> tuple[Placement, ...]:
    return tuple(Partial() if place in places else Replicate() for place in range(count))


def _shard(letters: str, letter: str, otherwise: Placement) -> Placement:
    return Shard(letters.index(letter)) if letter in letters else otherwise


def choose(call: Call, signature: Signature, share: bool = False) -> Chosen:
    """The cheapest way on each axis; with `share` axes that hold everything whole take a part of what others send."""
    tensors = [tensor for _, tensor in call.spots()]
    order = range(call.mesh.ndim)
    picked = [min(ways_of(signature), key=lambda way: _cost(tensors, way, axis, call)) for axis in order]
    if share and any(_cost(tensors, picked[axis], axis, call)[0] for axis in order):
        _share(picked, call, signature)
    return Chosen(
        call,
        signature,
        tuple(tuple(picked[axis].inputs[i] for axis in order) for i in range(len(signature.inputs))),
        tuple(tuple(picked[axis].outputs[i] for axis in order) for i in range(len(signature.outputs))),
    )


def _share(picked: list[Way], call: Call, signature: Signature) -> None:
    """Where an axis has everything whole, cut what costs nothing to cut: then the other axes send less."""
    tensors = [tensor for _, tensor in call.spots()]
    for axis, way in enumerate(picked):
        if any(is_shard(place) for place in way.inputs):
            continue
        for letter, other in zip(signature.free, ways_of(signature), strict=False):
            if _is_shareable(letter, tensors, signature, axis, call):
                rest = [way for way in ways_of(signature) if way != other]
                for number in (number for number, chosen in enumerate(picked) if chosen == other):
                    picked[number] = min(rest, key=lambda way: _cost(tensors, way, number, call))
                picked[axis] = other
                break


def _is_shareable(letter: str, tensors: list[torch.Tensor], signature: Signature, axis: int, call: Call) -> bool:
    """Whether every rank of an axis has all that goes by a letter, nothing else cuts it, and they can share it."""
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


def _cost(tensors: Sequence[torch.Tensor], way: Way, axis: int, call: Call) -> tuple[float, int]:
    """Bytes moved, then how many placements change."""
    moved_bytes, changes = 0.0, 0
    joined = [_place(tensor, axis) for tensor in tensors]
    for tensor, wanted in zip(tensors, way.inputs, strict=True):
        present = _place(tensor, axis)
        if present == wanted:
            continue
        changes += 1
        if not present.is_replicate() and wanted.is_partial():
            return float("inf"), changes
        sizes, later = _held(tensor, wanted, axis, call)
        cost = _received(present, wanted, sizes, later, call.mesh.size(axis), call.mesh.device_type == "cpu")
        if present.is_partial() and is_shard(wanted) and wanted not in joined:
            size, ranks = sizes[wanted.dim], call.mesh.size(axis)
            cost *= 2 if size <= -(-size // ranks) * (ranks - 1) else 1  # some have nothing: the others gather it later
        moved_bytes += cost * tensor.element_size()
    return moved_bytes, changes


def _place(tensor: torch.Tensor, axis: int) -> Placement:
    return tensor.placements[axis] if isinstance(tensor, DTensor) else Replicate()


def _held(tensor: torch.Tensor, wanted: Placement, axis: int, call: Call) -> tuple[list[int], int]:
    """The sizes of what the other axes leave to a rank, at most; and how many ranks must first bring theirs together.

    These are the ranks of later axes that cut the dim which this axis is to cut: shards are cut in the order of axes.
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
    """The numbers that a rank receives on one axis, padded; all of them where torch `gathers` to exchange shards."""
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
    call: Call, signature: Signature, local: Local | None = None, *, skip_empty: bool = True, share: bool = False
) -> Any:
    """Move the inputs as the signature allows, run on what this rank then has, and wrap the results.

    `skip_empty=False` calls `local` on empty shards too: it must when it communicates. `share` as `choose` has it.
    """
    chosen = choose(call, signature, share)
    spots = list(call.spots())
    tensors = {
        spot: moved(tensor, placements, call.mesh)
        for (spot, tensor), placements in zip(spots, chosen.inputs, strict=True)
    }
    if skip_empty and any(
        part.numel() == 0 and tensor.numel() for part, (_, tensor) in zip(tensors.values(), spots, strict=True)
    ):
        return _nothing(chosen, spots[0][1])
    result = call.run(tensors) if local is None else local(chosen, tensors)
    return _wrapped(chosen, result)


def _nothing(chosen: Chosen, like: torch.Tensor) -> Any:
    """The results of a rank whose shard is empty: empty shards, and zeros where the ranks' results are summed."""
    metas = private.global_outputs(chosen.call.info)
    several = not hasattr(metas, "dtype")
    results: list[Any] = []
    for meta, placements in zip(metas if several else [metas], chosen.outputs, strict=False):
        if meta is None:
            results.append(None)
            continue
        sizes, _ = private.local_box(meta.shape, chosen.call.mesh, placements)
        local = torch.zeros(sizes, dtype=meta.dtype, device=private.local_of(like).device)  # type: ignore[arg-type]
        results.append(wrap(local, chosen.call.mesh, placements, meta.shape))
    return tuple(results) if several else results[0]


def _wrapped(chosen: Chosen, result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return _wrap_one(chosen, result, 0)
    wrapped = [
        _wrap_one(chosen, item, place) if isinstance(item, torch.Tensor) else item for place, item in enumerate(result)
    ]
    return wrapped if isinstance(result, list) else tuple(wrapped)


def _wrap_one(chosen: Chosen, local: torch.Tensor, place: int) -> DTensor:
    placements, letters = chosen.outputs[place], chosen.signature.outputs[place]
    shape = list(local.shape)
    for placement in placements:
        if is_shard(placement):
            shape[placement.dim] = chosen.size(letters[placement.dim])
    return wrap(local, chosen.call.mesh, placements, shape)
