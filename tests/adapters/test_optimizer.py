"""Optimizers: state and options by parameter key, whatever the order, the grouping or the class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.core.warnings import HoldfastWarning
from tests.cli.calls import call


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def step(model: nn.Module, optimizer: Any, times: int = 2) -> None:
    for _ in range(times):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    return {f"{names[id(p)]}/{name}": value for p, state in optimizer.state.items() for name, value in state.items()}


def options(model: nn.Module, optimizer: Any, name: str) -> dict[str, Any]:
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    return {names[id(p)]: group[name] for group in optimizer.param_groups for p in group["params"]}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[key].dtype and torch.equal(value, b[key]), key
        else:
            assert value == b[key], key


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stepped", [True, False], ids=["into-stepped", "into-unstepped"])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, name: str, stepped: bool) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    other = model_of(1)
    fresh = OPTIMIZERS[name](other.parameters())
    if stepped:
        step(other, fresh, 3)
    holdfast.load(tmp_path / "x", {"model": other, "optimizer": fresh})
    assert_same(states(model, optimizer), states(other, fresh))
    for live, life in ((model, optimizer), (other, fresh)):
        torch.manual_seed(5)
        step(live, life)
    assert_same(states(model, optimizer), states(other, fresh))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def two_groups(model: nn.Sequential, swap: bool = False) -> torch.optim.AdamW:
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.1, "weight_decay": 0.0},
        {"params": list(model[1].parameters()), "lr": 0.2, "weight_decay": 0.5},
    ]
    return torch.optim.AdamW(reversed(groups) if swap else groups)


def test_options_follow_keys_when_groups_change_order(tmp_path: Path) -> None:
    model, other = model_of(), model_of(1)
    optimizer = two_groups(model)
    optimizer.param_groups[0]["lr"] = 0.7
    step(model, optimizer)
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    fresh = two_groups(other, swap=True)
    holdfast.load(tmp_path / "x", {"model": other, "optimizer": fresh})
    for name in ("lr", "weight_decay"):
        assert options(other, fresh, name) == options(model, optimizer, name)
    assert len(fresh.param_groups) == 2
    assert_same(states(model, optimizer), states(other, fresh))


def test_options_follow_keys_when_groups_are_merged_or_split(tmp_path: Path) -> None:
    model, other = model_of(), model_of(1)
    optimizer = two_groups(model)
    step(model, optimizer)
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    merged = torch.optim.AdamW(other.parameters(), lr=9.0)
    report = holdfast.load(tmp_path / "x", {"model": other, "optimizer": merged})
    assert options(other, merged, "lr") == options(model, optimizer, "lr")
    assert any("moved to a new group" in note for note in report.notes)
    step(other, merged)
    each = torch.optim.AdamW([{"params": [p]} for p in other.parameters()], lr=9.0)
    holdfast.load(tmp_path / "x", {"model": other, "optimizer": each})
    assert options(other, each, "weight_decay") == options(model, optimizer, "weight_decay")
    assert len(each.param_groups) == 4


def test_an_unstepped_optimizer_is_restored_as_unstepped(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    other = model_of(1)
    stepped = torch.optim.AdamW(other.parameters(), lr=9.0)
    step(other, stepped)
    report = holdfast.load(tmp_path / "x", {"model": other, "optimizer": stepped})
    assert not report.missing and not stepped.state and stepped.param_groups[0]["lr"] == 0.03


def test_a_parameter_without_state_stays_without(tmp_path: Path) -> None:
    model = model_of()
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    other = model_of(1)
    fresh = torch.optim.AdamW(other.parameters())
    step(other, fresh)
    holdfast.load(tmp_path / "x", {"model": other, "optimizer": fresh})
    assert other[1].bias not in fresh.state and other[1].weight in fresh.state


def test_moments_that_are_not_stored_are_missing_not_silently_new(tmp_path: Path) -> None:
    small, large = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(small.parameters())
    step(small, optimizer)
    holdfast.save(tmp_path / "x", {"model": small, "optimizer": optimizer})
    fresh = torch.optim.AdamW(large.parameters())
    with pytest.raises(holdfast.Mismatch, match=r"optimizer: 1\.weight/\*"):
        holdfast.load(tmp_path / "x", {"model": large, "optimizer": fresh})
    with pytest.warns(HoldfastWarning, match="not all of the state was loaded"):
        report = holdfast.load(tmp_path / "x", {"model": large, "optimizer": fresh}, strict=False)
    assert "model: 1.weight" in report.missing and large[0].weight in fresh.state


def test_parameters_of_no_module_in_the_state_are_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(holdfast.LayoutError, match="belongs to no module"):
        holdfast.save(tmp_path / "x", {"optimizer": optimizer})


def test_actor_and_critic_side_by_side(tmp_path: Path) -> None:
    actor, critic = model_of(0), model_of(1)
    both = torch.optim.AdamW([*actor.parameters(), *critic.parameters()])
    own = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    step(actor, both)
    step(critic, own)
    state = {"actor": actor, "critic": critic, "both": both, "critic_optimizer": own}
    checkpoint = holdfast.save(tmp_path / "x", state)
    assert "actor.0.weight/exp_avg" in checkpoint.keys("both")
    assert "0.weight/momentum_buffer" in checkpoint.keys("critic_optimizer")
    new_actor, new_critic = model_of(2), model_of(3)
    new_both = torch.optim.AdamW([*new_actor.parameters(), *new_critic.parameters()])
    new_own = torch.optim.SGD(new_critic.parameters(), lr=0.1, momentum=0.9)
    holdfast.load(
        tmp_path / "x", {"actor": new_actor, "critic": new_critic, "both": new_both, "critic_optimizer": new_own}
    )
    assert_same(states(actor, both), states(new_actor, new_both))
    assert_same(states(critic, own), states(new_critic, new_own))
    assert torch.equal(new_critic[0].weight, critic[0].weight) and not torch.equal(actor[0].weight, critic[0].weight)


class WithMasters(torch.optim.SGD):
    """bf16 parameters, fp32 masters in the state, as mixed-precision optimizers keep them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master_param", p.detach().float())
                master -= group["lr"] * p.grad.float()
                p.copy_(master)


def test_masters_are_a_group_of_their_own(tmp_path: Path) -> None:
    model = model_of().to(torch.bfloat16)
    optimizer = WithMasters(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(3, 4).bfloat16()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint = holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    assert checkpoint.keys("master_weights") == checkpoint.keys("model")
    assert checkpoint.keys("optimizer") == []
    other = model_of(1).to(torch.bfloat16)
    fresh = WithMasters(other.parameters(), lr=0.5)
    holdfast.load(tmp_path / "x", {"model": other, "optimizer": fresh})
    assert_same(states(model, optimizer), states(other, fresh))
    wide = model_of(2)
    holdfast.load(tmp_path / "x", {"model": wide})
    assert torch.equal(wide[0].weight, optimizer.state[model[0].weight]["master_param"]), "load prefers the masters"


def test_schedulers_resume(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make: list[Any] = [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    ]
    for index, build in enumerate(make):
        scheduler = build(optimizer)
        for value in (3.0, 2.0, 4.0):
            optimizer.step()
            scheduler.step(*([value] if index == 2 else []))
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        holdfast.save(tmp_path / str(index), state)
        fresh_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fresh = build(fresh_optimizer)
        holdfast.load(tmp_path / str(index), {"model": model, "optimizer": fresh_optimizer, "scheduler": fresh})
        assert fresh.state_dict() == scheduler.state_dict()
        assert type(fresh.state_dict().get("milestones")) is type(scheduler.state_dict().get("milestones"))


def test_a_scheduler_follows_groups_that_changed_order(tmp_path: Path) -> None:
    model, other = model_of(), model_of(1)
    optimizer = two_groups(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for _ in range(3):
        step(model, optimizer, 1)
        scheduler.step()
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    fresh = two_groups(other, swap=True)
    again = torch.optim.lr_scheduler.StepLR(fresh, 2, gamma=0.5)
    holdfast.load(tmp_path / "x", {"model": other, "optimizer": fresh, "scheduler": again})
    assert again.base_lrs == [0.2, 0.1] and again.get_last_lr() == [0.1, 0.05]
    for live, life, rates in ((model, optimizer, scheduler), (other, fresh, again)):
        step(live, life, 1)
        rates.step()
    assert options(other, fresh, "lr") == options(model, optimizer, "lr")


# States with tensors inside: the lists of LBFGS, the preconditioners of Shampoo and SOAP.


def lbfgs_of(model: nn.Module) -> Any:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe")


def search(model: nn.Module, optimizer: Any, times: int) -> list[float]:
    data, losses = torch.linspace(-1, 1, 12).reshape(3, 4), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data).sin() - 0.3).square().sum()
        loss.backward()
        return loss

    for _ in range(times):
        losses.append(optimizer.step(closure).item())
    return losses


def all_tensors(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [(name, all_tensors(item)) for name, item in sorted(value.items())]
    if isinstance(value, list):
        return [all_tensors(item) for item in value]
    return [value.tolist(), str(value.dtype)] if isinstance(value, torch.Tensor) else [value, type(value)]


@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("background", [False, True])
def test_lbfgs_goes_on_exactly(tmp_path: Path, before: int, background: bool) -> None:
    model = model_of()
    optimizer = lbfgs_of(model)
    search(model, optimizer, 2)
    if background:
        with holdfast.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"model": model, "optimizer": optimizer}).result()
            search(model, optimizer, 1)  # the history grows, and so do its keys
            checkpointer.save(2, {"model": model, "optimizer": optimizer}).result()
    else:
        search(model, optimizer, 1)
        holdfast.save(tmp_path / "step-000000000002", {"model": model, "optimizer": optimizer})
    other = model_of(1)
    live = lbfgs_of(other)
    search(other, live, before)  # a fresh one, one that has stepped, one with a longer history
    holdfast.load(tmp_path / "step-000000000002", {"model": other, "optimizer": live})
    assert all_tensors(states(model, optimizer)) == all_tensors(states(other, live))
    assert [loss.hex() for loss in search(other, live, 3)] == [loss.hex() for loss in search(model, optimizer, 3)]


class Preconditioned(torch.optim.Optimizer):
    """Keeps a list of matrices and an array of numpy per parameter, as Shampoo and its relatives do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {"number": 0, "factors": [torch.zeros(size, size) for size in param.shape]}
                    state |= {"by_name": {"a/b": torch.zeros_like(param)}, "seen": [np.zeros(2)]}
                state["number"] += 1
                state["seen"][0] += state["number"]
                state["by_name"]["a/b"].add_(param.grad)
                for dim, factor in enumerate(state["factors"]):
                    rows = param.grad.movedim(dim, 0).flatten(1)
                    factor.add_(rows @ rows.T if rows.ndim == 2 else rows)
                param.sub_(param.grad, alpha=group["lr"] / state["number"])


def test_lists_and_dicts_of_tensors_in_a_state(tmp_path: Path) -> None:
    model = model_of()
    optimizer = Preconditioned([parameter for parameter in model.parameters() if parameter.ndim == 2])
    step(model, optimizer)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert "0.weight/factors.1" in holdfast.open(tmp_path / "c").keys("optimizer")
    other = model_of(1)
    live = Preconditioned([parameter for parameter in other.parameters() if parameter.ndim == 2])
    holdfast.load(tmp_path / "c", {"model": other, "optimizer": live})
    kept, found = states(model, optimizer), states(other, live)
    assert kept.keys() == found.keys()
    for key, value in kept.items():
        if isinstance(value, list):
            same = [np.array_equal(a, b) and type(a) is type(b) for a, b in zip(value, found[key], strict=True)]
            assert all(same), key
        elif isinstance(value, dict):
            assert torch.equal(value["a/b"], found[key]["a/b"])
        else:
            assert value == found[key]


def saved_lbfgs(folder: Path) -> tuple[nn.Module, Any]:
    model = model_of()
    optimizer = lbfgs_of(model)
    search(model, optimizer, 3)
    holdfast.save(folder, {"model": model, "optimizer": optimizer})
    return model, optimizer


def test_lbfgs_over_other_parameters_is_refused(tmp_path: Path) -> None:
    saved_lbfgs(tmp_path / "c")
    other = model_of(1)
    for parameters in (list(other.parameters())[::-1], list(other.parameters())[:3]):
        live = torch.optim.LBFGS(parameters)
        for strict in (True, False):
            with pytest.raises(holdfast.Mismatch, match="another order or with other sizes"):
                holdfast.load(tmp_path / "c", {"optimizer": live, "model": other}, strict=strict, only=["optimizer"])
            assert not live.state


def test_a_mapping_refuses_states_with_tensors_inside(tmp_path: Path) -> None:
    model, optimizer = saved_lbfgs(tmp_path / "c")
    with pytest.raises(holdfast.Unsupported, match=r"a mapping cannot follow.*0\.weight/"):
        holdfast.save(tmp_path / "d", {"model": model, "optimizer": optimizer}, mapping="0.weight -> a.weight")
    (tmp_path / "map.txt").write_text("1.weight^T -> 1.weight")
    done = call("convert", tmp_path / "c", tmp_path / "d", "--map", tmp_path / "map.txt")
    assert done.exit_code == 1 and "a mapping cannot follow" in str(done.exception)
    done = call("convert", tmp_path / "c", tmp_path / "d", "--to", "dcp")
    assert done.exit_code == 1 and "cannot be written as torch DCP" in str(done.exception)


def test_tensors_inside_a_state_are_filled_in_place_and_chosen_by_key(tmp_path: Path) -> None:
    saved, optimizer = saved_lbfgs(tmp_path / "c")
    wanted = states(saved, optimizer)
    model = model_of(1)
    live = lbfgs_of(model)
    search(model, live, 3)
    first = states(model, live)["0.weight/old_dirs"][0]
    kept = states(model, live)["0.weight/old_stps"][0].clone()
    state = {"model": model, "optimizer": live}
    holdfast.load(tmp_path / "c", state, ignore=["*/old_stps.*"])
    found = states(model, live)
    assert found["0.weight/old_dirs"][0] is first and torch.equal(first, wanted["0.weight/old_dirs"][0])
    assert torch.equal(found["0.weight/old_stps"][0], kept)
    holdfast.load(tmp_path / "c", state, only=["*/old_stps.*"])
    assert all_tensors(states(model, live)) == all_tensors(wanted)


def test_a_cast_takes_the_history_along(tmp_path: Path) -> None:
    saved_lbfgs(tmp_path / "c")
    model = model_of(1).double()
    live = lbfgs_of(model)
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": live}, cast=True)
    assert {value.dtype for value in states(model, live)["0.weight/old_dirs"]} == {torch.float64}
    assert states(model, live)["0.weight/d"].dtype == torch.float64


def test_loaded_states_have_the_order_of_the_file(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    other = model_of(1)
    live = torch.optim.AdamW(other.parameters())
    holdfast.load(tmp_path / "c", {"model": other, "optimizer": live})
    assert [list(state) for state in live.state.values()] == [["exp_avg", "exp_avg_sq", "step"]] * 4
