"""Tensor subclasses without a library: stored as the tensors inside, loaded into live ones of the same class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import holdfast
from holdfast.adapters.saving.optimizer_forecast import stepped_tensors


class Scaled(torch.Tensor):
    """A tensor as int8 times a scale; every operation computes with the product."""

    data8: torch.Tensor
    scale: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, data8: torch.Tensor, scale: torch.Tensor, context: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data8.shape, dtype=torch.float32, device=data8.device)

    def __init__(self, data8: torch.Tensor, scale: torch.Tensor, context: Any = None):
        self.data8, self.scale, self.context = data8, scale, context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data8", "scale"], {"context": self.context, "device": self.device}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["data8"], inner["scale"], context["context"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8, args[0].scale, args[0].context)
        args, kwargs = tree_map_only(Scaled, lambda x: x.data8.float() * x.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


class Pair(Scaled):
    """A subclass whose first tensor is a subclass itself."""


def scaled(seed: int, shape: tuple[int, ...] = (4, 6), context: Any = None) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(-128, 127, shape, dtype=torch.int8, generator=generator)
    return Scaled(data, torch.rand(shape[0], 1, generator=generator), context)


def model_of(seed: int, context: Any = None) -> Any:
    model = nn.Module()
    for number, name in enumerate(("first", "second")):
        child = nn.Module()
        child.weight = nn.Parameter(scaled(seed + number, context=context), requires_grad=False)
        model.add_module(name, child)
    return model


def test_a_module_keeps_each_of_its_subclass_weights(tmp_path: Path) -> None:
    model, other = model_of(1), model_of(5)
    checkpoint = holdfast.save(tmp_path / "c", {"model": model})
    keys = ["first.weight.data8", "first.weight.scale", "second.weight.data8", "second.weight.scale"]
    assert checkpoint.keys("model") == keys  # weights of the same shape are not taken for tied ones
    assert (checkpoint.read("first.weight.data8") == model.first.weight.data8.numpy()).all()
    before = other.first.weight, other.first.weight.data8
    report = holdfast.load(tmp_path / "c", {"model": other})
    assert sorted(report.loaded) == [f"model: {key}" for key in keys]
    assert before[0] is other.first.weight and before[1] is other.first.weight.data8
    for name in ("first", "second"):
        live, saved = getattr(other, name).weight, getattr(model, name).weight
        assert torch.equal(live.data8, saved.data8) and torch.equal(live.scale, saved.scale)


def test_what_is_not_the_same_subclass_is_refused_by_key(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": model_of(1, {"block": 4, "kinds": [torch.int8]})})
    with pytest.raises(holdfast.Mismatch, match=r"first\.weight: the Scaled differs.*block: stored 4, live 8"):
        holdfast.load(tmp_path / "c", {"model": model_of(1, {"block": 8, "kinds": [torch.int8]})})
    plain = model_of(1)
    for child in (plain.first, plain.second):
        child.weight = nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(holdfast.Mismatch, match=r"stored as the tensor subclass Scaled.*live one is a plain float32"):
        holdfast.load(tmp_path / "c", {"model": plain})
    with pytest.raises(holdfast.Mismatch, match="live one is a plain float32"):
        holdfast.load(tmp_path / "c", {"model": plain}, cast=True)
    holdfast.save(tmp_path / "plain", {"model": plain})
    with pytest.raises(holdfast.Mismatch, match=r"first\.weight: stored as a plain float32.*tensor subclass Scaled"):
        holdfast.load(tmp_path / "plain", {"model": model_of(1)}, cast=True)


def test_what_cannot_be_described_is_refused_when_saved(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match=r"first\.weight: the context .* builtins.object"):
        holdfast.save(tmp_path / "c", {"model": model_of(1, object())})


def test_a_key_of_another_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.LayoutError, match=r"the key w\.scale belongs to a tensor inside"):
        holdfast.save(tmp_path / "c", {"d": {"w": scaled(1), "w.scale": torch.zeros(4, 1)}})


def test_subclasses_inside_of_subclasses_and_dicts(tmp_path: Path) -> None:
    def value(seed: int) -> dict[str, Any]:
        return {"pair": Pair(scaled(seed), torch.full((1,), float(seed))), "n": seed}

    checkpoint = holdfast.save(tmp_path / "c", {"d": value(1)})
    assert checkpoint.keys("d") == ["pair.data8.data8", "pair.data8.scale", "pair.scale"]
    live: dict[str, Any] = {"d": value(2)}
    holdfast.load(tmp_path / "c", live)
    assert live["d"]["n"] == 1 and live["d"]["pair"].scale.item() == 1.0
    assert torch.equal(live["d"]["pair"].data8.data8, scaled(1).data8)
    with pytest.raises(holdfast.Mismatch, match="no live tensor to take its class from"):
        holdfast.load(tmp_path / "c", {"d": None})


class Holding:
    def state_dict(self) -> dict[str, Any]:
        return {"w": scaled(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_inside_of_an_object_a_subclass_is_refused_when_saved(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match="Scaled cannot be stored here"):
        holdfast.save(tmp_path / "c", {"o": Holding()})


def test_patterns_select_a_subclass_by_its_own_key(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": model_of(1)})
    live = model_of(5)
    report = holdfast.load(tmp_path / "c", {"model": live}, ignore=["second.weight"])
    assert torch.equal(live.first.weight.data8, scaled(1).data8) and report.unexpected == ()
    assert torch.equal(live.second.weight.data8, scaled(6).data8)
    holdfast.load(tmp_path / "c", {"model": live}, only=["second.weight"])
    assert torch.equal(live.second.weight.data8, scaled(2).data8)


def test_a_mapping_goes_past_a_subclass_or_is_refused(tmp_path: Path) -> None:
    model = model_of(1)
    model.bias = nn.Parameter(torch.ones(3))
    with pytest.raises(holdfast.Unsupported, match=r"cannot follow the tensor subclass first\.weight"):
        holdfast.save(tmp_path / "c", {"model": model}, mapping="first.weight.data8 -> one.data8")
    checkpoint = holdfast.save(tmp_path / "c", {"model": model}, mapping="bias -> offset")
    assert {"offset", "first.weight.data8"} < set(checkpoint.keys("model"))
    live = model_of(5)
    live.bias = nn.Parameter(torch.zeros(3))
    holdfast.load(tmp_path / "c", {"model": live}, mapping="offset -> bias")
    assert live.bias.sum() == 3 and torch.equal(live.first.weight.data8, model.first.weight.data8)


def test_rounded_weights_leave_what_is_inside_as_it_is(tmp_path: Path) -> None:
    checkpoint = holdfast.save(tmp_path / "c", {"model": model_of(1)}, model_dtype="bfloat16")
    assert {checkpoint.read(key).dtype.name for key in checkpoint.keys("model")} == {"int8", "float32"}
    assert checkpoint.read("first.weight.scale").dtype == "float32"


class Keeper(torch.optim.SGD):
    """An optimizer that keeps a subclass per parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("kept", scaled(9, tuple(param.shape)))
            self.state[param]["kept"].data8.add_(1)


def test_optimizer_states_in_background_saves(tmp_path: Path) -> None:
    model = nn.Linear(6, 4, bias=False)
    optimizer = Keeper(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        for number in range(1, 4):
            optimizer.step()
            checkpointer.save(number, state).result(60)
    kept = optimizer.state[model.weight]["kept"]
    saved = kept.data8.clone()
    inner = {tensor.data_ptr() for tensor in stepped_tensors(optimizer)}
    assert {kept.data8.data_ptr(), kept.scale.data_ptr()} < inner  # a capture on a device waits for these
    kept.data8.zero_()
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 3
    assert torch.equal(kept.data8, saved)
    fresh = nn.Linear(6, 4, bias=False)
    with pytest.raises(holdfast.Mismatch, match="has no such state yet"):
        holdfast.load(tmp_path / "step-000000000003", {"model": fresh, "optimizer": Keeper(fresh.parameters(), lr=0.1)})


def test_a_replaced_inner_tensor_is_saved(tmp_path: Path) -> None:
    model = model_of(1)
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}).result(60)
        checkpointer.save(2, {"model": model}).result(60)
        old = model.first.weight.data8  # alive, so that its memory is not reused
        model.first.weight.data8 = torch.full_like(old, 7)
        checkpointer.save(3, {"model": model}).result(60)
    assert (holdfast.open(tmp_path / "step-000000000003").read("first.weight.data8") == 7).all()


def test_averages_of_a_subclass_are_refused() -> None:
    with pytest.raises(holdfast.Unsupported, match=r"first\.weight is the tensor subclass Scaled"):
        holdfast.EMA(model_of(1), 0.9)
