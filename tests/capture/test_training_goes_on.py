"""Training goes on during every save: what is published is the state at the call, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
SEEDS = 100
WIDTH = 64


class Run:
    """A model with BatchNorm, its optimizer, a target network and an average; one seed, one history."""

    def __init__(self, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.device = device
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)).to(device)
        self.target = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)).to(device)
        self.target.requires_grad_(False)
        self.target.load_state_dict(self.model.state_dict())
        kind = seed % 4
        parameters = list(self.model.parameters())
        if kind == 0:
            self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(parameters, fused=True)]
        elif kind == 1:
            self.optimizers = [torch.optim.AdamW(parameters, foreach=True, amsgrad=True)]
        elif kind == 2:
            self.optimizers = [torch.optim.SGD(parameters, lr=0.01, momentum=0.9)]
        else:
            self.optimizers = [torch.optim.AdamW(parameters[:2]), torch.optim.SGD(parameters[2:], lr=0.01)]
        self.ema = holdfast.EMA(self.model, 0.9, device=self.random.choice(["same", "cpu"]))

    @property
    def state(self) -> dict[str, Any]:
        out = {"model": self.model, "target": self.target, "ema": self.ema}
        return out | {f"optimizer{number}": one for number, one in enumerate(self.optimizers)}

    def train(self) -> None:
        """One step with gradient accumulation, and everything else that changes tensors."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _ in range(self.random.randint(1, 2)):
            self.model(torch.randn(16, WIDTH, device=self.device)).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.ema.update()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        if self.random.random() < 0.5:
            with self.ema.swap():
                self.model(torch.randn(16, WIDTH, device=self.device))

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        yield from (("model", key, value) for key, value in self.model.state_dict().items())
        yield from (("target", key, value) for key, value in self.target.state_dict().items())
        yield from (("ema/model", key, shard.tensor) for key, shard in self.ema.holdfast_averages().items())
        keys = {id(param): key for key, param in self.model.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for param, state in optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield f"optimizer{number}", f"{keys[id(param)]}/{name}", value


@pytest.mark.sliced(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", range(4))
def test_the_published_bytes_are_the_state_at_the_call(tmp_path: Path, device: str, kind: int) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        for seed in range(kind, SEEDS, 4):
            run = Run(seed, device)
            for _ in range(run.random.randint(1, 3)):
                run.train()
            expected = [(group, key, value.clone()) for group, key, value in run.tensors()]
            handle = checkpointer.save(seed, run.state)
            for _ in range(run.random.randint(1, 3)):
                run.train()
            checkpoint = handle.result(60)
            for group, key, value in expected:
                stored = checkpoint.read(key, group).tobytes()
                assert stored == value.cpu().numpy().tobytes(), f"seed {seed}: {group}: {key}"


@pytest.mark.parametrize("device", DEVICES)
def test_optimizers_that_were_compiled_are_saved_right(tmp_path: Path, device: str) -> None:
    model: Any = torch.compile(nn.Linear(8, 8).to(device), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8, device=device)).sum().backward()
        optimizer.step()

    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore({"model": model, "optimizer": optimizer})
        for number in range(4):
            step()
            expected = {key: value.clone() for key, value in model._orig_mod.state_dict().items()}
            handle = checkpointer.save(number, {"model": model, "optimizer": optimizer})
            step()
            for key, value in expected.items():
                assert torch.equal(torch.from_numpy(handle.result(60).read(key)), value.cpu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:an optimizer steps inside a CUDA graph")
@pytest.mark.parametrize("before", [True, False])
def test_steps_inside_a_cuda_graph_are_captured_at_the_call(tmp_path: Path, before: bool) -> None:
    weight = torch.ones(4 << 20, device="cuda", requires_grad=True)
    module: Any = nn.Module()
    module.weight = nn.Parameter(weight.detach().clone())
    optimizer = torch.optim.AdamW(module.parameters(), capturable=True)
    checkpointer = holdfast.Checkpointer(tmp_path)
    state = {"model": module, "optimizer": optimizer}
    if before:
        checkpointer.restore(state)

    def step() -> None:
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(4):
        graph.replay()
        expected = module.weight.detach().clone()
        handle = checkpointer.save(number, state)
        for _ in range(20):
            graph.replay()
        assert torch.equal(torch.from_numpy(handle.result(60).read("weight")), expected.cpu())
    checkpointer.close()
