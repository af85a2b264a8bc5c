"""Code that torch's load_state_dict runs: post-hooks run after a load, the rest is refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.utils import parametrizations, spectral_norm

import holdfast


class Derived(nn.Module):
    """A layer that keeps something computed from its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.seen: list[Any] = []
        self.register_load_state_dict_post_hook(type(self).derive)
        self.derive(_IncompatibleKeys([], []))

    def derive(self, keys: Any) -> None:
        self.twice = self.weight.detach() * 2
        self.seen.append(keys)


def saved(path: Path, model: nn.Module, **others: Any) -> Path:
    holdfast.save(path / "x", {"model": model, **others})
    return path / "x"


def test_post_hooks_run_with_torchs_arguments_in_torchs_order(tmp_path: Path) -> None:
    path = saved(tmp_path, nn.Sequential(Derived(), nn.Sequential(Derived())))
    live: Any = nn.Sequential(Derived(), nn.Sequential(Derived()))
    order: list[str] = []
    for name, part in live.named_modules():
        part.register_load_state_dict_post_hook(lambda module, keys, name=name: order.append(name))
    expected: list[str] = []
    twin = nn.Sequential(Derived(), nn.Sequential(Derived()))
    for name, part in twin.named_modules():
        part.register_load_state_dict_post_hook(lambda module, keys, name=name: expected.append(name))
    twin.load_state_dict(twin.state_dict())
    report = holdfast.load(path, {"model": live})
    assert order == expected == ["0", "1.0", "1", ""]
    for part in (live[0], live[1][0]):
        assert torch.equal(part.twice, part.weight.detach() * 2)
        assert isinstance(part.seen[-1], _IncompatibleKeys) and part.seen[-1] == ([], [])
    assert report.missing == ()


def test_post_hooks_run_in_restore(tmp_path: Path) -> None:
    model = Derived()
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model}).result(60)
        live = Derived()
        assert checkpointer.restore({"model": live}) == 1
    assert torch.equal(live.twice, model.twice)


@pytest.mark.slow
def test_wrapped_modules_run_their_hooks(tmp_path: Path) -> None:
    path = saved(tmp_path, Derived())
    live: Any = torch.compile(Derived())
    holdfast.load(path, {"model": live})
    assert torch.equal(live._orig_mod.twice, live._orig_mod.weight.detach() * 2)


def test_hooks_see_and_may_change_what_is_missing(tmp_path: Path) -> None:
    path = saved(tmp_path, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    live = nn.Sequential(nn.Linear(2, 2), nn.Module(), nn.Linear(2, 2))
    seen: list[tuple[list[str], list[str]]] = []

    def forgive(module: nn.Module, keys: Any) -> None:
        seen.append((list(keys.missing_keys), list(keys.unexpected_keys)))
        keys.missing_keys.clear()
        keys.unexpected_keys.remove("1.bias")

    live.register_load_state_dict_post_hook(forgive)
    report = holdfast.load(path, {"model": live}, strict=False)  # no warning: the hook says that nothing is missing
    assert seen == [(["2.bias", "2.weight"], ["1.bias", "1.weight"])]
    assert report.missing == () and report.unexpected == ("model: 1.weight",)


def test_a_hook_that_finds_something_missing_fails_a_strict_load(tmp_path: Path) -> None:
    path = saved(tmp_path, nn.Linear(2, 2))
    live = nn.Linear(2, 2)
    live.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.append("scale"))
    with pytest.raises(holdfast.Mismatch, match="post-hooks of the modules say:\n  missing: model: scale"):
        holdfast.load(path, {"model": live})
    with pytest.warns(holdfast.HoldfastWarning, match="model: scale"):
        holdfast.load(path, {"model": live}, strict=False)


def test_hooks_of_a_module_that_is_left_out_do_not_run(tmp_path: Path) -> None:
    live = Derived()
    path = saved(tmp_path, Derived(), n={"n": 1})
    holdfast.load(path, {"model": live, "n": None}, ignore=["model"])
    assert len(live.seen) == 1


class Converting(nn.Linear):
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Overriding(nn.Linear):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().load_state_dict(*args, **options)
        self.norm = self.weight.norm().item()
        return found


def hooked(register: str) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module, register)(lambda *args: None)
    return module


def patched() -> nn.Module:
    module = nn.Linear(2, 2)
    module.load_state_dict = partial(Overriding.load_state_dict, module)  # type: ignore[arg-type]
    return module


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Overriding(2, 2), r"the module \(Overriding\) has a load_state_dict of its own, .*Overriding\.load"),
        (lambda: nn.Sequential(Converting(2, 2)), r"0 \(Converting\) has a _load_from_state_dict of its own"),
        (lambda: nn.Sequential(hooked("register_load_state_dict_pre_hook")), r"0 \(Linear\) has a load_.* pre-hook"),
        (lambda: nn.Sequential(hooked("_register_load_state_dict_pre_hook")), r"0 \(Linear\) has a load_.* pre-hook"),
        (patched, r"the module \(Linear\) has a load_state_dict of its own"),
        (lambda: torch.compile(Overriding(2, 2)), r"the module \(Overriding\)"),
        (lambda: torch.compile(nn.Sequential(Converting(2, 2))), r"model: 0 \(Converting\)"),
        (lambda: torch.compile(nn.DataParallel(nn.Sequential(Converting(2, 2)))), r"model: 0 \(Converting\)"),
    ],
)
def test_what_would_be_skipped_is_refused_and_nothing_is_touched(tmp_path: Path, make: Any, named: str) -> None:
    live = make()
    path = saved(tmp_path, make())
    before = {key: value.clone() for key, value in live.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(holdfast.Unsupported, match=named) as caught:
            holdfast.load(path, {"model": live}, strict=strict)
        assert "ignore=[" in str(caught.value) and "module.load_state_dict(tensors)" in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in live.state_dict().items())


def test_a_tied_layer_with_a_load_of_its_own_is_refused(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), Converting(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    path = saved(tmp_path, tied())
    with pytest.raises(holdfast.Unsupported, match=r"model: 1 \(Converting\)"):
        holdfast.load(path, {"model": tied()})


def test_the_ways_out_of_the_refusal_work(tmp_path: Path) -> None:
    source: Any = nn.Sequential(Converting(2, 2), nn.Linear(2, 2))
    path = saved(tmp_path, source)
    live: Any = nn.Sequential(Converting(2, 2), nn.Linear(2, 2))
    holdfast.load(path, {"model": live}, ignore=["0.*"])
    assert torch.equal(live[1].weight, source[1].weight) and not torch.equal(live[0].weight, source[0].weight)
    tensors = {key: value.clone() for key, value in live.state_dict().items()}
    holdfast.load(path, {"model": tensors})
    live.load_state_dict(tensors)
    assert torch.equal(live[0].weight, source[0].weight * 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
        lambda: spectral_norm(nn.Linear(4, 4)),
        lambda: nn.LSTM(4, 4),
        torch.ao.quantization.FakeQuantize,
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_torchs_own_modules_load_as_before(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(1)
    source = make()
    path = saved(tmp_path, source)
    live = make()
    holdfast.load(path, {"model": live})
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in live.state_dict().items())


def test_hooks_of_transformers_that_rename_old_keys_are_no_obstacle(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaModel

    config = MambaConfig(vocab_size=8, hidden_size=4, state_size=2, num_hidden_layers=1)
    source, live = MambaModel(config), MambaModel(config)
    assert live._load_state_dict_pre_hooks
    holdfast.load(saved(tmp_path, source), {"model": live})
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in live.state_dict().items())


def test_a_lazy_module_without_shapes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match="model: weight has no shape yet"):
        saved(tmp_path, nn.LazyLinear(2))


def test_an_overridden_state_dict_is_saved_as_it_says(tmp_path: Path) -> None:
    class Renamed(nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            found = super().state_dict(*args, **options)
            return {f"old_{key}": value for key, value in found.items()}

    class Odd(nn.Linear):
        def state_dict(self) -> Any:  # type: ignore[override]
            return {}

    path = saved(tmp_path, source := Renamed(2, 2))
    assert holdfast.open(path).keys("model") == ["old_bias", "old_weight"]
    live = Renamed(2, 2)
    holdfast.load(path, {"model": live})
    assert torch.equal(live.weight, source.weight)
    with pytest.raises(holdfast.Unsupported, match="state_dict of Odd cannot be called with keep_vars=True"):
        saved(tmp_path, Odd(2, 2))


def stepped(make: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_optimizers_post_hooks_run_and_its_pre_hooks_are_refused(tmp_path: Path) -> None:
    model, optimizer = stepped(torch.optim.AdamW)
    path = saved(tmp_path, model, optimizer=optimizer)
    live, other = stepped(torch.optim.AdamW)
    steps: list[float] = []
    other.register_load_state_dict_post_hook(lambda own: steps.append(own.state[live.weight]["step"].item()))
    stepped_again = model(torch.ones(1, 2)).sum()
    stepped_again.backward()
    holdfast.load(path, {"model": live, "optimizer": other})
    assert steps == [1.0]
    other.register_load_state_dict_pre_hook(lambda own, state: None)
    with pytest.raises(holdfast.Unsupported, match="optimizer: the optimizer AdamW has a load_state_dict pre-hook"):
        holdfast.load(path, {"model": live, "optimizer": other})
    holdfast.load(path, {"model": live, "optimizer": other}, ignore=["optimizer"])


class Loading(torch.optim.SGD):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.loaded = True


class Counting(torch.optim.SGD):
    """Keeps something outside of `state`, and says so in state_dict."""

    count = 0

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}


class Delegating(torch.optim.SGD):
    def state_dict(self) -> Any:
        return super().state_dict()


class Loose(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.state["count"] = {"n": 1}
        return super().step(closure)


def test_optimizers_that_say_more_than_their_state_are_refused(tmp_path: Path) -> None:
    model, optimizer = stepped(partial(Loading, lr=0.1, momentum=0.9))
    path = saved(tmp_path, model, optimizer=optimizer)
    with pytest.raises(holdfast.Unsupported, match="the optimizer Loading has a load_state_dict of its own"):
        holdfast.load(path, {"model": model, "optimizer": optimizer})
    model, optimizer = stepped(partial(Counting, lr=0.1, momentum=0.9))
    with pytest.raises(holdfast.Unsupported, match="holds count, param_groups, state instead of"):
        saved(tmp_path, model, optimizer=optimizer)
    model, optimizer = stepped(partial(Loose, lr=0.1, momentum=0.9))
    with pytest.raises(holdfast.Unsupported, match=r"keeps state\['count'\]"):
        saved(tmp_path, model, optimizer=optimizer)
    model, optimizer = stepped(partial(Delegating, lr=0.1, momentum=0.9))
    saved(tmp_path, model, optimizer=optimizer)
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "more": 1})
    with pytest.raises(holdfast.Unsupported, match="holds more, param_groups, state"):
        saved(tmp_path, model, optimizer=optimizer)


def test_the_way_out_for_an_optimizer_works(tmp_path: Path) -> None:
    class Kept:
        def __init__(self, optimizer: Any) -> None:
            self.state_dict = optimizer.state_dict
            self.load_state_dict = optimizer.load_state_dict

    model, optimizer = stepped(partial(Loading, lr=0.1, momentum=0.9))
    path = saved(tmp_path, model, optimizer=Kept(optimizer))
    live, other = stepped(partial(Loading, lr=0.2, momentum=0.9))
    holdfast.load(path, {"model": live, "optimizer": Kept(other)})
    assert other.loaded and other.param_groups[0]["lr"] == 0.1
    momentum = [own.state[own.param_groups[0]["params"][0]]["momentum_buffer"] for own in (optimizer, other)]
    assert torch.equal(*momentum)


def test_stale_plain_values_of_an_optimizer_go(tmp_path: Path) -> None:
    model, optimizer = stepped(torch.optim.AdamW)
    path = saved(tmp_path, model, optimizer=optimizer)
    live, other = stepped(torch.optim.AdamW)
    other.state[live.weight]["stale"] = 5
    holdfast.load(path, {"model": live, "optimizer": other})
    assert "stale" not in other.state[live.weight] and other.state[live.weight]["step"].item() == 1
