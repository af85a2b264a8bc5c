"""Methods run on whole tensors in memory, in chunks of any size."""

import math
from unittest import mock

import torch

from holdfast.merging.methods import base, method_named
from holdfast.merging.methods.base import TensorTask
from holdfast.merging.random_masks import ElementDraws


class InMemory:
    def __init__(self, tensors):
        self._tensors = [tensor.flatten() for tensor in tensors]

    def read(self, start, stop, inputs=None):
        chosen = range(len(self._tensors)) if inputs is None else inputs
        return [self._tensors[number][start:stop].clone() for number in chosen]


def task_of(method, tensors, per_input, base_at=0, **shared):
    known = method_named(method).parameters
    defaults = {p.name: p.default for p in known if not p.per_model}
    own = {p.name: p.default for p in known if p.per_model}
    names = tuple(f"m{number}" for number in range(len(tensors)))
    shape, dtype = tuple(tensors[0].shape), tensors[0].dtype
    per = tuple({**own, **values} for values in per_input)
    return TensorTask("w", shape, math.prod(shape), dtype, names, base_at, {**defaults, **shared}, per)


def run(method, tensors, per_input, base_at=0, chunk=1 << 18, draws=None, **shared):
    """Scan and merge whole tensors in chunks."""
    task, chosen = task_of(method, tensors, per_input, base_at, **shared), method_named(method)
    chosen.check(task)
    draws, reader = draws or ElementDraws(7), InMemory(tensors)
    with mock.patch.object(base, "CHUNK_ELEMENTS", chunk):
        scanned = chosen.scan(task, reader, draws) if chosen.needs_scan(task) else None
        parts = [
            chosen.merge(task, scanned, start, reader.read(start, stop), draws)
            for start, stop in base.chunk_ranges(task.elements, chosen.unit(task))
        ]
    return torch.cat(parts).reshape(tensors[0].shape)


def three(dtype=torch.bfloat16, shape=(13, 21)):
    generator = torch.Generator().manual_seed(3)
    base_tensor = torch.randn(shape, generator=generator)
    return [(base_tensor + scale * torch.randn(shape, generator=generator)).to(dtype) for scale in (0, 0.1, 0.2)]
