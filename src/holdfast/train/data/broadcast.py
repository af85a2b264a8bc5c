"""Broadcast of nested batches from one rank to its group, as a size and a single buffer.

No pickle: the buffer holds the structure as JSON, followed by the bytes of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from holdfast.core.errors import HoldfastError, Unsupported, error_from_record, error_record

_ALIGN = 16  # so that a slice of the buffer can be viewed as any dtype
_PLAIN = (str, int, float, bool, type(None))


def broadcast_batch(
    read: Callable[[], Any], group: dist.ProcessGroup | None, source: int, device: torch.device | str = "cpu"
) -> Any:
    """Call `read` on rank `source` and return its result on every rank of the group.

    Batches are dicts, lists and tuples of tensors, strings, numbers and None. If `read` fails, every
    rank of the group raises the error.
    """
    if group is None or dist.get_world_size(group) == 1:
        return _to_device(read(), device)
    if dist.get_rank() != source:
        return _receive(group, source, device)
    failure: Exception | None = None
    batch = None
    try:
        batch = read()
        buffer = encode(batch)
    except Exception as error:  # noqa: BLE001  (the other ranks must be notified of any failure)
        failure = error
        buffer = torch.frombuffer(bytearray(json.dumps(error_record(error)).encode()), dtype=torch.uint8)
    size = torch.tensor([-buffer.numel() if failure else buffer.numel()], device=device)
    dist.broadcast(size, source, group=group)
    dist.broadcast(buffer.to(device), source, group=group)
    if failure is not None:
        raise failure
    return _to_device(batch, device)


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
    """Encode a batch as one buffer: length of the structure, structure, tensors."""
    tensors: list[torch.Tensor] = []
    structure = json.dumps(_structure(batch, "batch", tensors)).encode()
    head = len(structure).to_bytes(8, "little") + structure
    parts = [np.frombuffer(head.ljust(_aligned(len(head)), b"\0"), np.uint8)]
    for tensor in tensors:
        whole = tensor.detach().cpu().resolve_conj().contiguous()
        # A single element counts as contiguous whatever its stride, but cannot be viewed as bytes.
        flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()
        parts.append(np.pad(flat, (0, _aligned(len(flat)) - len(flat))))
    return torch.from_numpy(np.concatenate(parts))


def decode(buffer: torch.Tensor) -> Any:
    """Decode a buffer of `encode`; the tensors are views of the buffer."""
    length = int.from_bytes(bytes(buffer[:8].cpu().numpy()), "little")
    structure = json.loads(bytes(buffer[8 : 8 + length].cpu().numpy()))
    return _rebuild(structure, buffer, [_aligned(8 + length)])


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _structure(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON; containers and tensors become objects tagged with their kind."""
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
        f"{where} is a {type(value).__name__}: a batch may contain dicts with strings or integers as keys, lists, "
        "tuples, tensors, strings, numbers and None"
    )


def _rebuild(structure: Any, buffer: torch.Tensor, position: list[int]) -> Any:
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
        return {key: _rebuild(item, buffer, position) for key, item in content}
    items = [_rebuild(item, buffer, position) for item in content]
    return tuple(items) if kind == "tuple" else items


def _to_device(batch: Any, device: torch.device | str) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _to_device(item, device) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)([_to_device(item, device) for item in batch])
    return batch
