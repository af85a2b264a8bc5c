"""Models on the meta device: filled, the same objects as before, and untouched by a load that fails."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.adapters.loading.meta_tensors import MetaTensors


def channels_last() -> Any:
    conv: Any = nn.Conv2d(2, 3, 3)
    return conv.to(memory_format=torch.channels_last)


class Net(nn.Module):
    """Tied weights, a frozen one, a buffer, a channels-last one and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64), requires_grad=False)
        self.conv = channels_last()
        self.norm = nn.BatchNorm1d(4)
        self.empty = nn.Parameter(torch.empty(0, 3))


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def is_on_meta(module: nn.Module) -> bool:
    return all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def require_equal(live: nn.Module, saved: nn.Module) -> None:
    expected = saved.state_dict()
    assert live.state_dict().keys() == expected.keys()
    for key, value in live.state_dict().items():
        assert value.device.type == "cpu" and torch.equal(value, expected[key]), key
        assert value.stride() == expected[key].stride(), key


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Net]:
    model = Net()
    holdfast.save(tmp_path / "x", {"model": model})
    return tmp_path / "x", model


def test_a_model_on_meta_equals_the_saved_one_and_stays_the_same_objects(saved: tuple[Path, Net]) -> None:
    path, model = saved
    live = on_meta(Net)
    live.embed.weight.note = "kept"
    seen: list[int] = []
    live.embed.weight.register_post_accumulate_grad_hook(lambda param: seen.append(1))
    objects = {key: id(value) for key, value in live.state_dict(keep_vars=True).items()}
    report = holdfast.load(path, {"model": live})
    require_equal(live, model)
    assert {key: id(value) for key, value in live.state_dict(keep_vars=True).items()} == objects
    assert live.head.weight is live.embed.weight and live.embed.weight.note == "kept"
    assert not live.frozen.requires_grad and live.embed.weight.requires_grad
    assert report.on_meta == () and len(report.loaded) == len(live.state_dict()) - 1
    live.head(live.embed(torch.tensor([1]))).sum().backward()
    assert seen == [1] and live.embed.weight.grad is not None


def test_a_load_that_fails_leaves_everything_on_meta(saved: tuple[Path, Net], tmp_path: Path) -> None:
    path, _ = saved
    live = on_meta(Net)
    for state in ({"model": live, "other": torch.zeros(2)}, {"model": live, "n": 3}):
        with pytest.raises(holdfast.Mismatch, match="nothing was loaded"):
            holdfast.load(path, state)
        assert is_on_meta(live)
    (file,) = path.glob("model*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(holdfast.Damaged):
        holdfast.load(path, {"model": live})
    assert is_on_meta(live)


def test_an_optimizer_made_before_goes_on_with_the_loaded_weights(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1)

    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = make(model)
    step(model, optimizer)
    with holdfast.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).result(60)
        live = on_meta(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
        other = make(live)
        assert checkpointer.restore({"model": live, "optimizer": other}, device="cpu") == 1
        state = {"model": live, "optimizer": other}
        for _ in range(2):
            step(model, optimizer)
            step(live, other)
        require_equal(live, model)
        assert checkpointer.save(2, state).result(60).verify().damage == ()


def test_a_model_with_some_tensors_on_meta_is_filled_in_place_and_anew(saved: tuple[Path, Net]) -> None:
    path, model = saved
    live = on_meta(Net)
    live.conv = channels_last()
    address = live.conv.weight.data_ptr()
    holdfast.load(path, {"model": live})
    require_equal(live, model)
    assert live.conv.weight.data_ptr() == address


def test_patterns_fill_a_model_on_meta_in_parts(saved: tuple[Path, Net]) -> None:
    path, model = saved
    live = on_meta(Net)
    report = holdfast.load(path, {"model": live}, only=["conv.*", "frozen"])
    assert set(report.on_meta) == {
        *("model: embed.weight", "model: empty", "model: norm.weight", "model: norm.bias"),
        *("model: norm.running_mean", "model: norm.running_var", "model: norm.num_batches_tracked"),
        "model: head.weight",
    }
    assert live.conv.weight.device.type == "cpu" and live.norm.weight.is_meta and "still on the meta" in str(report)
    holdfast.load(path, {"model": live}, ignore=["conv.*", "frozen"])
    require_equal(live, model)


def test_what_is_not_filled_stays_on_meta_and_is_named(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"model": nn.Sequential(nn.Linear(3, 4))})
    live = on_meta(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    with pytest.raises(holdfast.Mismatch, match=r"missing in the checkpoint: model: 1\.weight"):
        holdfast.load(tmp_path / "x", {"model": live})
    with pytest.warns(holdfast.HoldfastWarning, match=r"still on the meta device: model: 1\.bias; model: 1\.weight"):
        report = holdfast.load(tmp_path / "x", {"model": live}, strict=False)
    assert report.on_meta == ("model: 1.bias", "model: 1.weight")
    assert live[1].weight.is_meta and not live[0].weight.is_meta
    wider = on_meta(lambda: nn.Sequential(nn.Linear(3, 5)))
    with pytest.raises(holdfast.Mismatch, match="the shape differs"):
        holdfast.load(tmp_path / "x", {"model": wider})
    assert is_on_meta(wider)


def test_casts_and_masters_reach_tensors_on_meta(tmp_path: Path) -> None:
    model: Any = nn.Linear(3, 4)
    holdfast.save(tmp_path / "x", {"model": model}, model_dtype="bfloat16")
    live = on_meta(lambda: nn.Linear(3, 4))
    holdfast.load(tmp_path / "x", {"model": live})
    require_equal(live, model)
    half = on_meta(lambda: nn.Linear(3, 4).half())
    with pytest.raises(holdfast.Mismatch, match="the dtype differs"):
        holdfast.load(tmp_path / "x", {"model": half})
    holdfast.load(tmp_path / "x", {"model": half}, cast=True)
    assert torch.equal(half.weight, model.weight.bfloat16().half())


def test_plain_tensors_and_mappings_may_be_on_meta(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"model": nn.Linear(3, 4), "values": {"a": torch.ones(3), "n": 2}})
    values: dict[str, Any] = {"a": torch.zeros(3, device="meta"), "n": 0}
    tensor = values["a"]
    live = on_meta(lambda: nn.Sequential(nn.Linear(3, 4)))
    holdfast.load(tmp_path / "x", {"model": live, "values": values}, mapping="weight -> 0.weight\nbias -> 0.bias")
    assert values["a"] is tensor and torch.equal(tensor, torch.ones(3)) and values["n"] == 2
    assert not is_on_meta(live)


def test_averages_on_meta_are_loaded(tmp_path: Path) -> None:
    model: Any = nn.Linear(3, 4)
    holdfast.save(tmp_path / "x", {"model": model, "ema": holdfast.EMA(model, 0.9)})
    live = on_meta(lambda: nn.Linear(3, 4))
    ema = holdfast.EMA(live, 0.9)
    holdfast.load(tmp_path / "x", {"model": live, "ema": ema})
    averages = [shard.tensor for shard in ema.holdfast_averages().values()]
    assert all(torch.equal(a, b) for a, b in zip(averages, model.parameters(), strict=True))
    ema.update()


def test_devices_that_cannot_hold_tensors_are_refused(saved: tuple[Path, Net]) -> None:
    path, _ = saved
    live = on_meta(Net)
    for device in ("meta", "nowhere", 1.5):
        with pytest.raises(holdfast.InvalidArgument, match="device="):
            holdfast.load(path, {"model": live}, device=device)
    with torch.device("meta"), pytest.raises(holdfast.InvalidArgument, match="call the load outside"):
        holdfast.load(path, {"model": live})
    with torch.device("meta"):
        holdfast.load(path, {"model": live}, device="cpu")
    assert not is_on_meta(live)


def test_tensors_that_cannot_be_exchanged_are_refused_before_anything_is_touched(saved: tuple[Path, Net]) -> None:
    path, _ = saved
    live = on_meta(Net)
    watcher = weakref.ref(live.conv.weight)
    with pytest.raises(holdfast.Unsupported, match="holds a weak reference"):
        holdfast.load(path, {"model": live})
    assert is_on_meta(live) and watcher() is live.conv.weight
    memory = torch.empty(6, device="meta")
    parts = nn.ParameterList([nn.Parameter(memory[:4]), nn.Parameter(memory[2:])])
    holdfast.save(path, {"model": nn.ParameterList([torch.ones(4), torch.ones(4)])})
    with pytest.raises(holdfast.Unsupported, match="share a part of their memory"):
        holdfast.load(path, {"model": parts})


def test_weights_that_share_their_memory_on_meta_share_it_after_the_load(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3, device="meta"))
    live = nn.ParameterList([weight, nn.Parameter(weight.detach())])
    holdfast.save(tmp_path / "x", {"model": nn.ParameterList([torch.ones(3), torch.ones(3)])})
    holdfast.load(tmp_path / "x", {"model": live})
    assert live[0] is not live[1] and live[0].data_ptr() == live[1].data_ptr()


def test_no_second_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Linear(3, 4)
    holdfast.save(tmp_path / "x", {"model": model})
    live = on_meta(lambda: nn.Linear(3, 4))
    made: list[torch.Tensor] = []
    use = MetaTensors.use

    def watch(self: MetaTensors, value: torch.Tensor, found: torch.Tensor) -> None:
        made.append(found)
        use(self, value, found)

    monkeypatch.setattr(MetaTensors, "use", watch)
    holdfast.load(tmp_path / "x", {"model": live})
    assert {live.weight.data_ptr(), live.bias.data_ptr()} == {tensor.data_ptr() for tensor in made}
