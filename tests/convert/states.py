"""States that conversions are tested on: a small model with an optimizer that has stepped, and odd tensors."""

from typing import Any

import torch

import holdfast


def trained(seed: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 31))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(5, 96)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def state() -> dict[str, Any]:
    model, optimizer = trained()
    odd = {
        "half": torch.randn(7, 5).to(torch.bfloat16),
        "wave": torch.tensor([3 + 4j, 1j], dtype=torch.complex128),
        "none": torch.zeros(0, 5),
        "one": torch.tensor(3.5),
        "bits": torch.arange(11) % 2 == 0,
    }
    return {"model": model, "optimizer": optimizer, "odd": odd, "note": {"epoch": 3}}


def save(path, block_bytes: int = 4096, max_shard_size: int | str = 20_000, **options):
    return holdfast.save(path, state(), step=7, block_bytes=block_bytes, max_shard_size=max_shard_size, **options)


def tensor_files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}
