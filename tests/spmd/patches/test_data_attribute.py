"""`p.data = other` on DTensors: p has the values and shares the memory of `other`, under FSDP2 too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks


def _enabled() -> DeviceMesh:
    import holdfast.spmd

    holdfast.spmd.enable()
    return init_device_mesh("cpu", (2,))


def _placed(values: torch.Tensor, mesh: DeviceMesh | None, place: Any = None) -> torch.Tensor:
    return values.clone() if mesh is None else distribute_tensor(values, mesh, [place or Shard(0)])


def _parameters(mesh: DeviceMesh | None) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(_placed(torch.arange(5.0), mesh)), nn.Parameter(_placed(torch.arange(5.0) * 10, mesh))


def _scaled(mesh: DeviceMesh | None) -> list[Any]:
    p, _ = _parameters(mesh)
    p.data = p.data * 2
    p.pow(2).sum().backward()
    return [p, p.grad]


def _swapped(mesh: DeviceMesh | None) -> list[Any]:
    p, q = _parameters(mesh)
    kept = p.data
    p.data = q.data
    q.data = kept
    return [p, q]


def _shared(mesh: DeviceMesh | None) -> list[Any]:
    p, q = _parameters(mesh)
    p.data = q.data
    p.data.add_(1.0)
    return [p, q]


def _placed_otherwise(mesh: DeviceMesh | None) -> list[Any]:
    p, _ = _parameters(mesh)
    p.data = _placed(torch.ones(5), mesh, Replicate())
    assert mesh is None or p.placements == (Shard(0),)
    return [p]


def _other_dtype_and_shape(mesh: DeviceMesh | None) -> list[Any]:
    p, q = _parameters(mesh)
    p.data = p.data.double()
    q.data = _placed(torch.ones(3, 2), mesh)
    return [p, q, p + 1]


def _gradient(mesh: DeviceMesh | None) -> list[Any]:
    p, _ = _parameters(mesh)
    p.grad = torch.ones_like(p)
    p.grad.data = p.grad.data * 3
    return [p.grad]


def _vector(mesh: DeviceMesh | None) -> list[Any]:
    parameters = _parameters(mesh)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters) * 2, parameters)
    return list(parameters)


def _stepped(mesh: DeviceMesh | None) -> list[Any]:
    p, q = _parameters(mesh)
    optimizer = torch.optim.Adam([p], lr=0.1)
    for values in (p.data, q.data):
        p.data = values
        p.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p, q]


CASES = [
    *(_scaled, _swapped, _shared, _placed_otherwise),
    *(_other_dtype_and_shape, _gradient, _vector, _stepped),
]


def _assigned() -> list[str]:
    mesh, wrong = _enabled(), []
    for case in CASES:
        for found, expected in zip(case(mesh), case(None), strict=True):
            whole = found.full_tensor()
            if whole.dtype != expected.dtype or not torch.allclose(whole, expected):
                wrong.append(f"{case.__name__}: {whole.tolist()}, not {expected.tolist()}")
    return wrong


def test_a_dtensor_takes_what_is_assigned_to_its_data():
    assert run_ranks(2, _assigned, deadline_s=120) == [[], []]


def _partial() -> list[Any]:
    mesh = _enabled()
    total = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    total.data = _placed(torch.arange(4.0), mesh)
    return [total.placements == (Shard(0),), total.full_tensor().tolist()]


def test_a_partial_takes_the_placements_of_what_is_assigned():
    assert run_ranks(2, _partial, deadline_s=120) == [[True, [0.0, 1.0, 2.0, 3.0]]] * 2


def _outputs(width: int) -> list[list[float]]:
    mesh = _enabled()
    model = nn.Sequential(nn.Linear(3, width, bias=False), nn.Linear(width, 2, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    x = torch.ones(1, 3)
    outputs = [model(x).tolist()]
    model(x).sum().backward()
    kept = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone() * 0.5
    outputs.append(model(x).tolist())
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        parameter.data = kept[name]
    outputs.append(model(x).tolist())
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [*(row[0] for row in outputs), model[1].weight.full_tensor()[0].tolist()]


def test_fsdp_gathers_what_was_assigned():
    for width in (4, 5):  # of five rows one rank has two and one of padding
        whole, half = 3.0 * width, 0.75 * width
        for outputs in run_ranks(2, _outputs, width, deadline_s=120):
            assert outputs[:3] == [[whole] * 2, [half] * 2, [whole] * 2]
            torch.testing.assert_close(outputs[3], [0.25] * width)  # 1 - 0.1 * (3 + 1.5 + 3)


def _refused() -> list[str]:
    mesh = _enabled()
    x, said = _placed(torch.arange(6.0), mesh), []
    other_mesh = init_device_mesh("cpu", (1, 2))
    others = (torch.ones(6), distribute_tensor(torch.ones(6), other_mesh, [Replicate(), Shard(0)]))
    for target, value in (*((x, other) for other in others), (x[1:5], _placed(torch.ones(4), mesh))):
        try:
            target.data = value
        except TypeError as error:
            said.append(str(error))
    return [*said, str(x.full_tensor().tolist())]


def test_what_cannot_be_shared_is_refused_on_every_rank():
    for said in run_ranks(2, _refused, deadline_s=120):
        assert len(said) == 4
        assert "plain tensor" in said[0] and "distribute_tensor" in said[0]
        assert "two meshes" in said[1]
        assert "view of a sharded dim" in said[2]
        assert said[3] == str([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])


def _compiled() -> list[Any]:
    mesh = _enabled()
    read = torch.compile(lambda x: x.data * 2, backend="aot_eager", fullgraph=True)(_placed(torch.arange(4.0), mesh))
    return [read.full_tensor().tolist(), isinstance(vars(DTensor)["data"], property)]


def test_reading_data_is_compiled_as_before():
    assert run_ranks(2, _compiled, deadline_s=180) == [[[0.0, 2.0, 4.0, 6.0], True]] * 2
