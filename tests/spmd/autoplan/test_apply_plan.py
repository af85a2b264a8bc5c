"""A plan applied on real ranks: the same results, the bytes that it said, and its place in the manifest."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from holdfast.spmd import Plan, distribute, plan
from holdfast.spmd.base.spmd_errors import PlanMismatch, SpmdArgumentError
from tests.cli.calls import call
from tests.dist.harness import run_ranks
from tests.spmd.autoplan.meshes import pretended_mesh
from tests.spmd.autoplan.models import Frozen, Images, Named, Prompted, Recurrent, TwoNames, transformer
from tests.spmd.listening import Listener

IDS = torch.arange(32).reshape(4, 8)


def _trained(model: nn.Module, x: Any, shape: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Plan, place and run a model; how it compares with one device, and what it said against what was heard."""
    expected = model(x)
    expected.square().mean().backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad()
    mesh = init_device_mesh("cpu", shape)
    found = plan(model, mesh, [x], **options)
    distribute(model, mesh, found)
    with Listener(shape[-1]) as heard:  # every axis has as many ranks
        out = model(x)
        torch.autograd.backward(out, torch.ones_like(out))
    model.zero_grad()
    out = model(x)
    out.square().mean().backward()
    placed = dict(model.named_parameters())
    differences = [(placed[key].grad.full_tensor() - gradients[key]).abs().max().item() for key in gradients]
    return {
        "plan": found.to_dict(),
        "heard": heard.bytes,
        "output": (out.full_tensor() - expected).abs().max().item(),
        "gradients": max(differences),
    }


def _on_two_by_two(folder: str) -> dict[str, Any]:
    import holdfast
    import holdfast.spmd

    holdfast.spmd.enable()
    model = transformer(layers=1)
    found = _trained(model, IDS, (2, 2), flops_per_byte=1e-3)
    holdfast.save(f"{folder}/blocking", {"model": model})
    with holdfast.Checkpointer(f"{folder}/run") as checkpointer:
        for step in (1, 2):  # the second save recalls what the first one learned
            checkpointer.save(step, {"model": model}).result(60)
    dist.barrier()
    return {"transformer": found, "images": _trained(Images().double(), torch.ones(4, 3, 8, 8).double(), (4,))}


@pytest.mark.full
def test_two_axes_train_as_one_device_does_and_the_manifest_has_the_plan(tmp_path: Path) -> None:
    answers = run_ranks(4, _on_two_by_two, str(tmp_path), deadline_s=100)
    for answer in answers:
        for found in answer.values():
            assert found["output"] < 1e-12 and found["gradients"] < 1e-12, found
            assert found["heard"] == found["plan"]["moved_bytes"]
    kept = Plan.from_dict(answers[0]["transformer"]["plan"])
    assert {"S0"} < {word for places in kept.to_dict()["parameters"].values() for word in places}
    for folder in ("blocking", "run/step-000000000001", "run/step-000000000002"):
        assert Plan.load(tmp_path / folder) == kept
    shown = call("show", tmp_path / "blocking")
    assert shown.exit_code == 0
    assert "model was sharded by a plan of holdfast.spmd: 15 roles" in shown.output


STRANGE: dict[str, tuple[Callable[[], nn.Module], Any, bool]] = {
    "made in forward": (Recurrent, torch.linspace(-1, 1, 192).double().reshape(4, 6, 8), False),
    "two names": (TwoNames, torch.linspace(-1, 1, 192).double().reshape(4, 6, 8), False),
    "between the layers": (Prompted, IDS, True),
    "by keywords": (Named, {"x": [torch.linspace(-1, 1, 192).double().reshape(4, 6, 8)]}, True),
    "frozen": (Frozen, torch.linspace(-1, 1, 192).double().reshape(4, 6, 8), True),
}


def _strange() -> dict[str, Any]:
    import holdfast.spmd

    holdfast.spmd.enable()
    found = {}
    for name, (make, x, _) in STRANGE.items():
        torch.manual_seed(2)
        found[name] = _trained(make().double(), x, (2,))
    return found


def test_models_that_planners_trip_over_train_as_one_device_does() -> None:
    for answer in run_ranks(2, _strange, deadline_s=100):
        for name, found in answer.items():
            assert found["output"] < 1e-12 and found["gradients"] < 1e-12, (name, found)
            if STRANGE[name][2]:
                assert found["heard"] == found["plan"]["moved_bytes"], (name, found)


def test_a_call_that_fails_leaves_no_mode_behind() -> None:
    with pretended_mesh("tp", 2) as mesh:
        model = Recurrent().double()
        placed = distribute(model, mesh, plan(model, mesh, torch.zeros(4, 6, 8).double()))
        with pytest.raises(RuntimeError, match="must be equal to input_size"):
            placed(torch.zeros(4, 6, 9).double())
        with pytest.raises(RuntimeError, match="got mixed"):
            placed.out.weight + torch.zeros(4, 12).double()


def test_a_plan_of_another_mesh_or_model_is_refused() -> None:
    with pretended_mesh("tp", 2) as mesh:
        found = plan(transformer(), mesh, [IDS])
        with pytest.raises(PlanMismatch, match=r"it has .*\[1-2\].down.bias.* which this model lacks"):
            distribute(transformer(3), mesh, found)
        with pytest.raises(PlanMismatch, match=r"lacks head.bias.*it has 0.weight"):
            distribute(Images(), mesh, found)
        placed = distribute(transformer(), mesh, found)
        with pytest.raises(SpmdArgumentError, match="placed already"):
            distribute(placed, mesh, found)
        fields = found.to_dict()
        fields["parameters"]["[1-2].norm1.weight"] = ["S3"]
        with pytest.raises(PlanMismatch, match=r"shards \[1-2\].norm1.weight by dim 3, but it has 1 dim"):
            distribute(transformer(), mesh, fields)
    with pretended_mesh("tp", 4) as mesh, pytest.raises(PlanMismatch, match=r"a mesh of \(2,\), this mesh is \(4,\)"):
        distribute(transformer(), mesh, found)


def test_tied_weights_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    with pretended_mesh("tp", 2) as mesh:
        found = plan(Tied(), mesh, [IDS])
        assert [role for role, _ in found.parameters] == ["embed.weight"]
        assert found.held_bytes == 2 * 32 * 16 * 4 // 2
        placed = distribute(Tied(), mesh, found)
        assert placed.head.weight is placed.embed.weight
        assert math.prod(placed.head.weight.to_local().shape) == 32 * 16 // 2
