"""What plan() proposes, on meshes without ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.spmd import Plan, plan
from holdfast.spmd.autoplan.units import PARTIAL, WHOLE, UnitWay
from holdfast.spmd.base.spmd_errors import SpmdArgumentError, UnsupportedCall
from tests.spmd.autoplan.meshes import pretended_mesh
from tests.spmd.autoplan.models import Chooses, Images, Named, Prompted, TwoNames, transformer

IDS = torch.zeros(4, 8, dtype=torch.long)
WORK_COUNTS = 1e-3  # a flop weighs as much as a thousand bytes: no axis may compute what another does


def proposed(model: nn.Module, inputs: list[Any], *axes: Any, **options: Any) -> Plan:
    with pretended_mesh(*axes) as mesh:
        return plan(model, mesh, inputs, **options)


def test_the_textbook_comes_out_and_each_line_says_against_what() -> None:
    found = proposed(transformer(), [IDS], "tp", 2)
    placed = dict(found.parameters)
    assert [placed[f"[1-2].{name}.weight"] for name in ("query", "key", "value", "up")] == [(0,)] * 4
    assert [placed[f"[1-2].{name}.weight"] for name in ("out", "down")] == [(1,)] * 2
    assert placed["[1-2].up.bias"] == (0,) and placed["[1-2].down.bias"] == (WHOLE,)
    assert dict(found.activations)["[1-2].up"].gives == (2,)
    assert any(line.startswith("[1-2] x2: query S0, ") and "it would be" in line for line in found.why)


def test_a_deeper_model_has_the_same_plan_of_more_bytes() -> None:
    shallow, deep = (proposed(transformer(layers), [IDS], "tp", 2) for layers in (2, 5))
    assert [places for _, places in shallow.parameters] == [places for _, places in deep.parameters]
    assert {role for role, _ in deep.parameters if role.startswith("[")} == {
        role.replace("[1-2]", "[1-5]") for role, _ in shallow.parameters if role.startswith("[")
    }
    assert deep.moved_bytes > shallow.moved_bytes


def test_planning_changes_nothing_of_the_model() -> None:
    model = transformer()
    before = copy.deepcopy(model.state_dict())
    proposed(model, [IDS], "tp", 2)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_module_in_two_places_keeps_its_values() -> None:
    model = TwoNames()
    before = copy.deepcopy(model.state_dict())
    found = proposed(model, [torch.zeros(4, 6, 8)], "tp", 2)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.others["again"] is model.block and model.alias is model.weight
    assert not any(role.startswith("others.again") for role, _ in found.parameters)


def test_inputs_may_be_one_tensor_or_named() -> None:
    x = torch.zeros(4, 6, 8)
    assert proposed(Named(), [{"x": [x]}], "tp", 2) == proposed(Named(), {"batch": {"x": [x]}}, "tp", 2)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    assert proposed(model, x, "tp", 2) == proposed(model, [x], "tp", 2) == proposed(model, {"input": x}, "tp", 2)


def test_parameters_between_the_layers_stay_whole_or_agree_and_the_reasons_say_so() -> None:
    found = proposed(Prompted(), [IDS], "tp", 2)
    placed = dict(found.parameters)
    assert placed["positions"] == (WHOLE,) and placed["embed.weight"] == (0,)  # as embedding and as head
    assert placed["layers.*.up.weight"] == (0,)
    assert found.why[-1] == "whole, since they are in no branch that can be cut: positions"
    held = sum(2 * p.nbytes / (2 if placed[_role(key)] != (WHOLE,) else 1) for key, p in Prompted().named_parameters())
    assert found.held_bytes == held


def _role(key: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in key.split("."))


def test_what_nothing_uses_is_planned_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.register_module("spare", nn.ParameterList([nn.Parameter(torch.zeros(8, 8)) for _ in range(9)]))
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    assert dict(proposed(model, [torch.zeros(4, 8)], "tp", 2).parameters)["spare.0"] == (WHOLE,)


def test_a_model_without_memory_is_planned_alike() -> None:
    with torch.device("meta"):
        empty = transformer()
    assert proposed(empty, [IDS], "tp", 2) == proposed(transformer(), [IDS], "tp", 2)


def test_where_work_counts_a_second_axis_divides_the_batch() -> None:
    found = proposed(transformer(), [IDS], "dp", 2, "tp", 2, flops_per_byte=WORK_COUNTS)
    streams = {pins.gives for role, pins in found.activations if role in ("0", "[1-2]")}
    assert len(streams) == 1 and 0 in next(iter(streams))
    sharded = [places for _, places in found.parameters if any(place != WHOLE for place in places)]
    assert sharded and len({tuple(place == WHOLE for place in places) for places in sharded}) == 1


def test_with_memory_enough_everything_is_whole_and_nothing_moves() -> None:
    found = proposed(transformer(), [IDS], "tp", 2, memory=1 << 30)
    assert found.moved_bytes == 0 and all(places == (WHOLE,) for _, places in found.parameters)


def test_memory_is_kept_or_the_error_says_how_much_it_takes() -> None:
    roomy = proposed(transformer(), [IDS], "tp", 2)
    allowed = roomy.held_bytes + roomy.kept_bytes
    found = proposed(transformer(), [IDS], "tp", 2, memory=allowed)
    assert found.held_bytes + found.kept_bytes <= allowed
    with pytest.raises(
        SpmdArgumentError, match=r"memory=1000: the best plan for this mesh takes (\d+) bytes"
    ) as caught:
        proposed(transformer(), [IDS], "tp", 2, memory=1000)
    least = int(str(caught.value).split(" takes ")[1].split()[0])
    assert proposed(transformer(), [IDS], "tp", 2, memory=least).held_bytes <= least


def test_with_less_memory_the_sequence_is_sharded_between_branches() -> None:
    from holdfast.train.models.decoder import Decoder
    from tests.dist.train_cases import model

    with torch.device("meta"):
        made = Decoder(model("qwen2", num_hidden_layers=2))
    ids = torch.zeros(1, 64, dtype=torch.long)  # one sequence: the batch does not divide
    roomy = proposed(made, [ids], "tp", 2)
    assert dict(roomy.activations)["model.norm"].gives == (WHOLE,)
    tight = proposed(made, [ids], "tp", 2, memory=int(0.9 * (roomy.held_bytes + roomy.kept_bytes)))
    assert dict(tight.activations)["model.norm"].gives == (1,)
    assert tight.kept_bytes < roomy.kept_bytes


def _sparse(ids: torch.Tensor, ranks: int, **changes: Any) -> Plan:
    from holdfast.train.models.decoder import Decoder
    from tests.dist.train_cases import model

    with torch.device("meta"):
        made = Decoder(model("qwen3_moe", num_hidden_layers=2, **changes))
    return proposed(made, [ids], "tp", ranks)


def test_a_small_router_stays_whole_though_tied_matrices_leave_little_else() -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}
    found = _sparse(torch.zeros(4, 16, dtype=torch.long), 8, **sizes)
    assert dict(found.parameters)["model.layers.*.mlp.gate.weight"] == (WHOLE,)


def test_streams_that_an_estimate_of_routing_cannot_tell_apart_are_cut_by_sequence() -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4}
    found = _sparse(torch.zeros(4, 16, dtype=torch.long), 4, **sizes)
    assert dict(found.activations)["model.norm"].gives == (1,)


def test_images_are_planned_too() -> None:
    found = proposed(Images(), [torch.zeros(4, 3, 8, 8)], "tp", 2)
    assert dict(found.parameters)["wide.weight"] == (0,) and dict(found.parameters)["norm.weight"] == (WHOLE,)


def test_a_module_that_looks_at_values_is_named() -> None:
    with pytest.raises(UnsupportedCall, match=r"cannot be planned: without contents 1 raised .*has to be a unit"):
        proposed(nn.Sequential(nn.Linear(4, 4), Chooses()), [torch.zeros(4, 4)], "tp", 2)


class _Unit(Chooses):
    def rehearse(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def placement_ways(self, x: torch.Tensor) -> list[UnitWay]:
        whole = UnitWay({"weight": WHOLE}, (WHOLE,), WHOLE)
        return [whole, UnitWay({"weight": 0}, (1,), PARTIAL), UnitWay({"weight": 1}, (WHOLE,), 1)]

    def flops(self, x: torch.Tensor) -> int:
        return 6 * x.numel() * 4


def test_a_unit_is_placed_by_the_ways_that_it_tells() -> None:
    found = proposed(nn.Sequential(nn.Linear(4, 4, bias=False), _Unit()), [torch.zeros(4, 4)], "tp", 2)
    placed = dict(found.parameters)
    assert placed["0.weight"] == (0,) and placed["1.weight"] == (0,)  # the columns that the first gives


def test_a_way_that_forgets_an_input_is_refused() -> None:
    class Forgets(_Unit):
        def placement_ways(self, x: torch.Tensor) -> list[UnitWay]:
            return [UnitWay({"weight": WHOLE}, (), WHOLE)]

    with pytest.raises(SpmdArgumentError, match="has to name every parameter and input"):
        proposed(nn.Sequential(Forgets()), [torch.zeros(4, 4)], "tp", 2)


def test_a_missing_mesh_or_model_is_named() -> None:
    with pytest.raises(SpmdArgumentError, match="the mesh is NoneType"):
        plan(transformer(), None, [IDS])  # type: ignore[arg-type]
    with pytest.raises(SpmdArgumentError, match="the model is list"):
        proposed([], [IDS], "tp", 2)  # type: ignore[arg-type]
