"""The collect cache returns what `collect` returns, and detects every change."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.adapters.live_state import classify_state
from holdfast.adapters.saving.collect import Collected, collect
from holdfast.adapters.saving.collect_cache import CollectCache
from holdfast.adapters.tensors import Holders


def make() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "note": {"a": 1}, "w": {"t": torch.ones(2)}}


def collect_state(state: dict[str, Any]) -> Collected:
    return collect(classify_state(state, {}), None)


def cached(state: dict[str, Any]) -> CollectCache:
    cache = CollectCache()
    cache.store(state, classify_state(state, {}), collect_state(state))
    return cache


def facts(collected: Collected) -> list[Any]:
    items = [
        (o.group, o.key, o.role, o.stored.name, o.holder.shape, o.holder.parts, o.holder.local) for o in collected.items
    ]
    reports = {name: report.digest for name, report in collected.value_reports(frozenset()).items()}
    return [[item[:6] for item in items], [item[6].data_ptr() for item in items], reports, collected.signature()]


def test_lookup_returns_what_collect_returns() -> None:
    state = make()
    cache = cached(state)
    for step in range(3):
        state["model"](torch.randn(3, 4)).sum().backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["note"] = {"a": step}
        recalled = cache.lookup(state, Holders(), None)
        assert recalled is not None and facts(recalled) == facts(collect_state(state))


def replace_data(state: dict[str, Any]) -> None:
    state["model"][0].weight.data = torch.zeros(6, 4)


def replace_parameter(state: dict[str, Any]) -> None:
    state["model"][0].weight = nn.Parameter(torch.zeros(6, 4))


def replace_state(state: dict[str, Any]) -> None:
    param = next(iter(state["optimizer"].state))
    state["optimizer"].state[param]["exp_avg"] = torch.zeros_like(param)


def add_state(state: dict[str, Any]) -> None:
    param = next(iter(state["optimizer"].state))
    state["optimizer"].state[param]["momentum"] = torch.zeros_like(param)


def add_buffer(state: dict[str, Any]) -> None:
    state["model"].register_buffer("late", torch.ones(1))


def rename(state: dict[str, Any]) -> None:
    state["model"].add_module("other", state["model"]._modules.pop("2"))


def make_transient(state: dict[str, Any]) -> None:
    state["model"][1]._non_persistent_buffers_set.add("running_mean")


def add_group(state: dict[str, Any]) -> None:
    state["optimizer"].add_param_group({"params": [torch.zeros(1, requires_grad=True)]})


def other_optimizer(state: dict[str, Any]) -> None:
    state["optimizer"] = torch.optim.SGD(state["model"].parameters())


def other_model(state: dict[str, Any]) -> None:
    state["model"] = nn.Linear(2, 2)


def add_name(state: dict[str, Any]) -> None:
    state["more"] = 1


def reshape_at_the_same_address(state: dict[str, Any]) -> None:
    weight = state["model"][0].weight
    weight.data = weight.data.view(4, 6)


def transpose_at_the_same_address(state: dict[str, Any]) -> None:
    moment = state["optimizer"].state[state["model"][2].weight]["exp_avg"]
    moment.data = moment.data.view(6, 2).t()


def recast_at_the_same_address(state: dict[str, Any]) -> None:
    count = state["model"][1].num_batches_tracked
    count.data = count.data.view(torch.float64)


def add_hook(state: dict[str, Any]) -> None:
    state["model"][1].register_state_dict_post_hook(lambda module, state, prefix, meta: None)


CHANGES = [
    reshape_at_the_same_address, transpose_at_the_same_address, recast_at_the_same_address, add_hook,
    replace_data, replace_parameter, replace_state, add_state, add_buffer, rename, make_transient, add_group,
    other_optimizer, other_model, add_name,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(change: Callable[[dict[str, Any]], None]) -> None:
    state = make()
    cache = cached(state)
    assert cache.lookup(state, Holders(), None) is not None
    change(state)
    assert cache.lookup(state, Holders(), None) is None


def test_a_tied_weight_that_is_untied_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight.data = model[0].weight.data
    state = {"model": model}
    cache = cached(state)
    assert cache.lookup(state, Holders(), None) is not None
    model[1].weight.data = torch.ones(3, 3)
    assert cache.lookup(state, Holders(), None) is None


class Turn(nn.Module):
    """One value of every kind, each of which may get another meaning at the address that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 17.0).half().view(4, 4))
        self.register_buffer("count", torch.arange(8))
        self.register_buffer("phase", torch.view_as_complex(torch.arange(8.0).view(4, 2)))


def turned(state: dict[str, Any]) -> None:
    """Change what bytes mean, and no address: what an allocator does with freed memory."""
    model, extra, optimizer = state["model"], state["extra"], state["optimizer"]
    model.weight.data = model.weight.data.view(torch.bfloat16)
    model.count.data = model.count.data.view(torch.float64).view(4, 2).t()
    model.phase.data = model.phase.data.conj()
    extra["t"].data = extra["t"].data.view(torch.int32)
    moment = optimizer.state[model.weight]["momentum_buffer"]
    moment.data = moment.data.view(torch.bfloat16).t()


def test_saves_follow_what_the_bytes_mean_now(tmp_path: Path) -> None:
    model = Turn()
    optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "extra": {"t": torch.arange(6.0)}}
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).result(60)
        addresses = [tensor.data_ptr() for tensor in (model.weight, model.count, model.phase, state["extra"]["t"])]
        turned(state)
        assert addresses == [t.data_ptr() for t in (model.weight, model.count, model.phase, state["extra"]["t"])]
        checkpoint = checkpointer.save(3, state).result(60)
    live = {**model.state_dict(), "t": state["extra"]["t"]}
    for key, tensor in live.items():
        found = checkpoint.read(key, "extra" if key == "t" else "model")
        assert found.dtype.name == str(tensor.dtype).removeprefix("torch.") and found.shape == tuple(tensor.shape), key
        assert found.tolist() == tensor.resolve_conj().tolist(), key
    moment = optimizer.state[model.weight]["momentum_buffer"]
    assert checkpoint.read("weight/momentum_buffer", "optimizer").tolist() == moment.tolist()


@pytest.mark.slow
def test_config_files_follow_a_cast_of_the_model(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, dtype="float32"
    )
    model: Any = LlamaForCausalLM(config)
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}).result(60)
        for step, dtype in ((2, torch.bfloat16), (3, torch.float16)):
            model.to(dtype)
            checkpoint = checkpointer.save(step, {"model": model}).result(60)
            assert checkpoint.config()["dtype"] == str(dtype).removeprefix("torch.")


class Odd(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


def test_modules_with_a_way_of_their_own_are_looked_at() -> None:
    assert cached({"model": Odd(2, 2)}).lookup({"model": Odd(2, 2)}, Holders(), None) is None
    hooked = nn.Linear(2, 2)
    hooked.register_state_dict_post_hook(lambda module, state, prefix, meta: None)
    assert cached({"model": hooked}).lookup({"model": hooked}, Holders(), None) is None


class WithoutShards:
    """An optimizer that declares its shards and has none on this rank, and no dict of attributes."""

    __slots__ = ("__weakref__", "param_groups")

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 1.0}]

    def holdfast_shards(self) -> list[Any]:
        return []


def test_an_optimizer_without_shards_is_looked_at_every_time(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = {"model": model, "optimizer": WithoutShards(model.parameters())}
    assert cached(state).lookup(state, Holders(), None) is None
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).result(60)


def test_nothing_is_kept_alive() -> None:
    state = make()
    cache = cached(state)
    weight = weakref.ref(state["model"][0].weight)
    moment = weakref.ref(next(iter(state["optimizer"].state.values()))["exp_avg"])
    state.clear()
    gc.collect()
    assert weight() is None and moment() is None
    assert cache is not None


def test_the_plan_of_a_placed_module_is_cached() -> None:
    state = make()
    state["model"].holdfast_plan = {"version": 1}
    recalled = cached(state).lookup(state, Holders(), None)
    assert recalled is not None and recalled.plans == collect_state(state).plans == {"model": {"version": 1}}
