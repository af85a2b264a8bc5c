"""Nested batches from one rank to its group in one go: a size, then one buffer, whatever the batch holds.

No pickle: the structure travels as JSON at the head of the buffer, tensors as their bytes behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from holdfast.core.errors import HoldfastError, Unsupported, error_from_record, error_record

_ALIGN = 16  # so that a part of the buffer may be seen as any dtype
_PLAIN = (str, int, float, bool, type(None))


def broadcast_batch(
    read: Callable[[], Any], group: dist.ProcessGroup | None, source: int, device: torch.device | str = "cpu"
) -> Any:
    """What `read` returns on rank `source`, on every rank of the group; only that rank calls it.

    Batches are dicts, lists and tuples of tensors, texts, numbers and None. If reading fails,
    every rank of the group raises it.
    """
    if group is None or dist.get_world_size(group) == 1:
        return _moved(read(), device)
    if dist.get_rank() != source:
        return _receive(group, source, device)
    failure: Exception | None = None
    batch = None
    try:
        batch = read()
        buffer = encode(batch)
    except Exception as error:  # noqa: BLE001  (the other ranks must hear of anything that stops this one)
        failure = error
        buffer = torch.frombuffer(bytearray(json.dumps(error_record(error)).encode()), dtype=torch.uint8)
    size = torch.tensor([-buffer.numel() if failure else buffer.numel()], device=device)
    dist.broadcast(size, source, group=group)
    dist.broadcast(buffer.to(device), source, group=group)
    if failure is not None:
        raise failure
    return _moved(batch, device)


def _receive(group: dist.ProcessGroup, source: int, device: torch.device | str) -> Any:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(size, source, group=group)
    buffer = torch.empty(abs(int(size)), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, source, group=group)
    if int(size) < 0:
        raise _failure(bytes(buffer.cpu().numpy()), source)
    return decode(buffer)


def _failure(record: bytes, source: int) -> HoldfastError:
    name, message = json.loads(record)
    return error_from_record([name, f"rank {source} could not read its batch: {message}"])


def encode(batch: Any) -> torch.Tensor:
    """One buffer of bytes: the length of the structure, the structure, the tensors."""
    tensors: list[torch.Tensor] = []
    structure = json.dumps(_structure(batch, "batch", tensors)).encode()
    head = len(structure).to_bytes(8, "little") + structure
    parts = [np.frombuffer(head.ljust(_aligned(len(head)), b"\0"), np.uint8)]
    for tensor in tensors:
        whole = tensor.detach().cpu().resolve_conj().contiguous()
        # One element counts as contiguous whatever its stride, and could not be viewed as bytes.
        flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()
        parts.append(np.pad(flat, (0, _aligned(len(flat)) - len(flat))))
    return torch.from_numpy(np.concatenate(parts))


def decode(buffer: torch.Tensor) -> Any:
    """The batch that `encode` made the buffer of; its tensors are parts of the buffer."""
    length = int.from_bytes(bytes(buffer[:8].cpu().numpy()), "little")
    structure = json.loads(bytes(buffer[8 : 8 + length].cpu().numpy()))
    return _rebuilt(structure, buffer, [_aligned(8 + length)])


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _structure(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """A value as JSON; every container and tensor is an object with its kind, so that texts stay texts."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if type(value) in (list, tuple):
        items = [_structure(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _structure(item, f"{where}[{key!r}]", tensors)] for key, item in value.items()]}
    raise Unsupported(
        f"{where} is a {type(value).__name__}: a batch is made of dicts with names or numbers as keys, lists, "
        "tuples, tensors, texts, numbers and None"
    )


def _rebuilt(structure: Any, buffer: torch.Tensor, position: list[int]) -> Any:
    if not isinstance(structure, dict):
        return structure
    kind, content = next(iter(structure.items()))
    if kind == "tensor":
        dtype, shape = getattr(torch, content[0]), tuple(content[1])
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        begin = position[0]
        position[0] += _aligned(size)
        return buffer[begin : begin + size].view(dtype).reshape(shape)
    if kind == "dict":
        return {key: _rebuilt(item, buffer, position) for key, item in content}
    items = [_rebuilt(item, buffer, position) for item in content]
    return tuple(items) if kind == "tuple" else items


def _moved(batch: Any, device: torch.device | str) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _moved(item, device) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)([_moved(item, device) for item in batch])
    return batch
