"""Loading rules: strictness, choices, casts, and nothing half-loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import holdfast
from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.core.warnings import HoldfastWarning
from holdfast.engine.load_wants import LoadWants


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    holdfast.save(tmp_path / "x", {"model": model, "note": {"epoch": 3}})
    return tmp_path / "x"


def other() -> Any:
    torch.manual_seed(9)
    return nn.Sequential(OrderedDict([("0", nn.Linear(3, 4)), ("1", nn.Linear(4, 5)), ("3", nn.Linear(2, 2).half())]))


def test_strict_lists_everything_at_once_and_touches_nothing(saved: Path) -> None:
    model = other()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {"model": model, "note": "live", "absent": 1}
    with pytest.raises(holdfast.Mismatch) as caught:
        holdfast.load(saved, state)
    text = str(caught.value)
    for word in ("missing in the checkpoint: model: 3.weight", "missing in the checkpoint: model: 3.bias"):
        assert word in text
    for word in (
        "not in the live state: model: 2.weight",
        "model: 1.weight: the shape differs: stored [2, 4], live [5, 4]",
    ):
        assert word in text
    assert "absent" in text and "nothing was loaded" in text
    assert state["note"] == "live"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_not_strict_loads_what_fits_and_reports_the_rest(saved: Path) -> None:
    model = other()
    state: dict[str, Any] = {"model": model, "note": None}
    with pytest.warns(HoldfastWarning, match="not all of the state was loaded"):
        report = holdfast.load(saved, state, strict=False)
    assert report.missing == ("model: 3.bias", "model: 3.weight")
    assert report.unexpected == ("model: 2.bias", "model: 2.weight")
    assert [text.split(":")[1].strip() for text in report.mismatched] == ["1.bias", "1.weight"]
    assert state["note"] == {"epoch": 3}
    assert torch.equal(model[0].weight, torch.from_numpy(holdfast.open(saved).read("0.weight")))


def test_only_and_ignore_choose_keys(saved: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    before = model[1].weight.detach().clone()
    report = holdfast.load(saved, {"model": model, "note": "live"}, only=["0.*", "model/2.bias"])
    assert report.loaded == ("model: 0.bias", "model: 0.weight", "model: 2.bias")
    assert torch.equal(model[1].weight, before)
    report = holdfast.load(saved, {"model": model}, ignore=["*.weight"])
    assert report.loaded == ("model: 0.bias", "model: 1.bias", "model: 2.bias")
    with pytest.raises(holdfast.InvalidArgument, match="list of strings"):
        holdfast.load(saved, {"model": model}, only="0.*")


def test_only_reads_only_what_it_needs(tmp_path: Path) -> None:
    state = {"w": {f"t{index}": torch.randn(1000) for index in range(20)}}
    holdfast.save(tmp_path / "x", state)
    report = holdfast.load(tmp_path / "x", state, only=["t7"], verify=False)
    assert report.read_bytes == report.needed_bytes == 4000


def test_dtypes_are_cast_only_when_asked(saved: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)).double()
    with pytest.raises(holdfast.Mismatch, match="stored float32, live float64; pass cast=True"):
        holdfast.load(saved, {"model": model})
    report = holdfast.load(saved, {"model": model}, cast=True)
    assert "model: 0.weight: float32 to float64" in report.cast
    assert torch.equal(model[0].weight.float(), torch.from_numpy(holdfast.open(saved).read("0.weight")))


def test_dicts_keep_their_tensors_and_get_new_values(tmp_path: Path) -> None:
    state: dict[str, Any] = {"ema": {"decay": 0.9, "w": torch.ones(3), "deep": [{"b": torch.zeros(2)}, "x"]}}
    holdfast.save(tmp_path / "x", state)
    tensor, deep = torch.full((3,), 7.0), torch.full((2,), 7.0)
    live: dict[str, Any] = {"ema": {"decay": 0.1, "w": tensor, "deep": [{"b": deep}, "y"]}}
    holdfast.load(tmp_path / "x", live)
    assert live["ema"]["w"] is tensor and torch.equal(tensor, torch.ones(3))
    assert live["ema"]["deep"][0]["b"] is deep and live["ema"]["deep"][1] == "x" and live["ema"]["decay"] == 0.9


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_stateful_objects_keep_arrays_bytes_and_tuples(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    value: dict[str, Any] = {
        "rng": np.random.RandomState(1).get_state(),
        "pcg": generator.bit_generator.state,
        "torch": torch.get_rng_state(),
        "bytes": b"\x00\xff",
        "keys": {1: "a", (2, 3): None},
        "numbers": (np.float32(1.5), np.int64(7), float("-inf")),
    }
    holdfast.save(tmp_path / "x", {"thing": Stateful(value)})
    fresh = Stateful(None)
    holdfast.load(tmp_path / "x", {"thing": fresh})
    assert np.array_equal(fresh.state["rng"][1], value["rng"][1]) and fresh.state["rng"][2:] == value["rng"][2:]
    assert torch.equal(fresh.state["torch"], value["torch"])
    for key in ("pcg", "bytes", "keys", "numbers"):
        assert fresh.state[key] == value[key]
    assert type(fresh.state["numbers"][0]) is np.float32


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_a_real_data_loader_resumes(tmp_path: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = list(range(40))
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    holdfast.save(tmp_path / "x", {"loader": loader})
    expected = [batch.tolist() for batch in iterator]
    fresh = StatefulDataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(8))
    holdfast.load(tmp_path / "x", {"loader": fresh})
    assert [batch.tolist() for batch in fresh] == expected


def test_a_pattern_that_fits_nothing_is_a_mistake(saved: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    choices: list[dict[str, Any]] = [{"only": ["modle.*"]}, {"ignore": ["*.biass"]}, {"only": ["0.*", "model.0.*"]}]
    for choice in choices:
        with pytest.raises(holdfast.Mismatch, match="fits no key"):
            holdfast.load(saved, {"model": model}, **choice)
    grown = nn.Sequential(*model, nn.Linear(2, 7))
    holdfast.load(saved, {"model": grown}, ignore=["3.*"])  # fits live keys only: a new head


def test_a_group_name_stands_for_all_of_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    report = holdfast.load(tmp_path / "x", {"model": model, "optimizer": fresh}, ignore=["optimizer"])
    assert report.loaded == ("model: bias", "model: weight") and not fresh.state and fresh.param_groups[0]["lr"] == 0.1
    report = holdfast.load(tmp_path / "x", {"model": model, "optimizer": fresh}, only=["optimizer"])
    assert len(report.loaded) == 2 and fresh.param_groups[0]["lr"] == 0.5


def test_state_of_a_parameter_that_changed_shape_does_not_load(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    wider = nn.Linear(4, 5)
    fresh = torch.optim.AdamW(wider.parameters())
    with pytest.raises(
        holdfast.Mismatch, match=r"optimizer: weight/exp_avg: the shape differs: stored \[3, 4\], live \[5, 4\]"
    ):
        holdfast.load(tmp_path / "x", {"model": wider, "optimizer": fresh})
    with pytest.warns(HoldfastWarning, match="not all of the state was loaded"):
        report = holdfast.load(tmp_path / "x", {"model": wider, "optimizer": fresh}, strict=False)
    assert not any("exp_avg" in text for text in report.loaded) and "model: weight" not in report.loaded
    wider(torch.ones(1, 4)).sum().backward()
    fresh.step()


def test_dicts_load_into_dicts_that_have_no_tensors_yet(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": {"w": torch.ones(3)}}
    holdfast.save(tmp_path / "x", state)
    fresh: dict[str, Any] = {
        "model": nn.Linear(2, 2).state_dict(),
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "ema": {},
    }
    holdfast.load(tmp_path / "x", fresh)
    assert torch.equal(fresh["ema"]["w"], torch.ones(3))
    assert torch.equal(fresh["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert torch.equal(fresh["model"]["weight"], model.weight)


def test_a_state_dict_takes_a_stored_module(saved: Path) -> None:
    weights = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)).state_dict()
    holdfast.load(saved, {"model": weights})
    assert torch.equal(weights["0.weight"], torch.from_numpy(holdfast.open(saved).read("0.weight")))


def test_a_dict_that_lacks_stored_keys_is_a_mismatch_not_damage(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"ema": {"a": torch.ones(1), "b": torch.ones(1), "decay": 0.5}})
    live: dict[str, Any] = {"ema": {"a": torch.zeros(1), "decay": 0.1}}
    with pytest.raises(holdfast.Mismatch, match="not in the live state: ema: b"):
        holdfast.load(tmp_path / "x", live)
    with pytest.raises(holdfast.Mismatch, match="net: no such entry; the checkpoint has ema"):
        holdfast.load(tmp_path / "x", {"net": 1})


def test_a_partial_load_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    stepped = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    stepped.step()
    holdfast.load(tmp_path / "x", {"model": model, "optimizer": stepped}, only=["model/*"])
    assert len(stepped.state) == 2


def test_what_was_an_optimizer_is_named_as_such(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    holdfast.save(tmp_path / "x", {"model": model, "thing": torch.optim.SGD(model.parameters(), lr=0.1)})
    with pytest.raises(holdfast.Mismatch, match="thing: saved as an optimizer"):
        holdfast.load(tmp_path / "x", {"model": model, "thing": Stateful(None)})


def test_complex_numbers_are_not_cast_to_real_ones(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"w": {"a": torch.ones(2, dtype=torch.complex64)}})
    with pytest.raises(holdfast.Mismatch, match="stored complex64, live float32"):
        holdfast.load(tmp_path / "x", {"w": {"a": torch.zeros(2)}}, cast=True)


def test_arrays_without_dims_stay_so(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"thing": Stateful({"a": np.array(3.5)})})
    fresh = Stateful(None)
    holdfast.load(tmp_path / "x", {"thing": fresh})
    assert fresh.state["a"].shape == () and float(fresh.state["a"]) == 3.5


def test_another_kind_of_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    momentum = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    momentum.step()
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": momentum})
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(holdfast.Mismatch, match=r"another kind of optimizer: AdamW has no state momentum_buffer"):
        holdfast.load(tmp_path / "x", {"model": model, "optimizer": adam})
    with pytest.warns(HoldfastWarning, match="not all of the state was loaded"):
        holdfast.load(tmp_path / "x", {"model": model, "optimizer": adam}, strict=False)
    assert not adam.state and "momentum" not in adam.param_groups[0]
    holdfast.load(tmp_path / "x", {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})


def test_kinds_of_optimizer_without_state_are_told_apart_by_their_options(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)})
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        holdfast.Mismatch, match=r"another kind of optimizer: the stored optimizer has dampening, momentum"
    ):
        holdfast.load(tmp_path / "x", {"model": model, "optimizer": adam})


@pytest.mark.parametrize(("saved", "live"), [("Adamax", "Adam"), ("Adadelta", "AdamW"), ("NAdam", "RAdam")])
def test_states_that_a_kind_of_optimizer_does_not_have_are_refused(tmp_path: Path, saved: str, live: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = getattr(torch.optim, saved)(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    with pytest.raises(holdfast.Mismatch, match=f"another kind of optimizer: {live} has no state"):
        holdfast.load(tmp_path / "x", {"model": model, "optimizer": getattr(torch.optim, live)(model.parameters())})


def test_kinds_of_optimizer_that_share_their_options_take_each_others_state(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    live = torch.optim.AdamW(model.parameters())
    report = holdfast.load(tmp_path / "x", {"model": model, "optimizer": live})
    assert not report.missing and not report.unexpected and not report.mismatched
    for param in model.parameters():
        assert live.state[param]["step"] == 1
        for name in ("exp_avg", "exp_avg_sq"):
            assert live.state[param][name].any() and torch.equal(live.state[param][name], optimizer.state[param][name])
    assert live.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_tied_weights_that_are_stored_twice_load_into_a_tied_model(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    weight = torch.randn(5, 3)
    save_file({"embed.weight": weight, "head.weight": weight.clone()}, tmp_path / "model.safetensors")
    model = Tied()
    report = holdfast.load(tmp_path, {"model": model})
    assert torch.equal(model.head.weight, weight) and not report.unexpected
    with pytest.raises(holdfast.Mismatch, match=r"not in the live state: model: other"):
        save_file({"embed.weight": weight, "other": weight.clone()}, tmp_path / "model.safetensors")
        holdfast.load(tmp_path, {"model": model})


def _cpu_of_a_load(path: Path, count: int, times: int) -> float:
    state = {"d": {f"t{number}": torch.zeros(2) for number in range(count)}}
    holdfast.save(path / str(count), state)
    found = []
    for _ in range(times):
        started = time.process_time()
        holdfast.load(path / str(count), state)
        found.append(time.process_time() - started)
    return min(found)


def test_the_time_of_a_load_grows_no_faster_than_the_dict(tmp_path: Path) -> None:
    few, many = _cpu_of_a_load(tmp_path, 1000, 3), _cpu_of_a_load(tmp_path, 12_000, 1)
    assert many / few < 28  # twelve times as many; the square would be a hundred and more


class _Head(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.e, self.h = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.h.weight = self.e.weight


def test_weights_that_are_tied_now_and_were_not_are_never_dropped(tmp_path):
    untied = _Head(tied=False)
    holdfast.save(tmp_path / "different", {"model": untied})
    with pytest.raises(Mismatch, match="share memory in the live state"):
        holdfast.load(tmp_path / "different", {"model": _Head(tied=True)})
    with torch.no_grad():
        untied.h.weight.copy_(untied.e.weight)
    holdfast.save(tmp_path / "equal", {"model": untied})
    live = _Head(tied=True)
    holdfast.load(tmp_path / "equal", {"model": live})
    assert torch.equal(live.h.weight, untied.e.weight)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_states_of_a_fresh_optimizer_are_cast_with_their_parameters(tmp_path, make):
    half = nn.Linear(3, 3).bfloat16()
    optimizer = make(half.parameters())
    half(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "a", {"model": half, "optimizer": optimizer})
    wide = nn.Linear(3, 3)
    other = make(wide.parameters())
    report = holdfast.load(tmp_path / "a", {"model": wide, "optimizer": other}, cast=True)
    kinds = {value.dtype for state in other.state.values() for value in state.values() if torch.is_tensor(value)}
    assert kinds == {torch.float32}
    assert any("optimizer: weight/" in text for text in report.cast)
    wide(torch.ones(1, 3)).sum().backward()
    other.step()


def test_a_folder_with_the_name_of_a_step_holds_that_step(tmp_path):
    assert holdfast.save(tmp_path / "step-000000000005", {"a": 1}).step == 5
    with pytest.raises(InvalidArgument, match="step=7, and the folder step-000000000005 is that of step 5"):
        holdfast.save(tmp_path / "step-000000000005", {"a": 1}, step=7)


@pytest.mark.parametrize("mappable", [True, False])
def test_two_tensors_take_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappable: bool) -> None:
    monkeypatch.setattr(LoadWants, "mappable", mappable)  # False as for object stores and network file systems
    stored = torch.arange(4096.0).reshape(64, 64)
    holdfast.save(tmp_path / "saved", {"model": {"w": stored}})
    live = {"whole": torch.zeros(64, 64), "half": torch.zeros(32, 64)}
    mapping = "w -> half, rest, axis=0\nw -> whole"
    holdfast.load(tmp_path / "saved", {"model": live}, mapping=mapping, strict=False)
    assert torch.equal(live["whole"], stored)
    assert torch.equal(live["half"], stored[:32])


BOUNDED = """
import json, os, sys, torch, holdfast
from pathlib import Path
from holdfast.plan import staging
staging.cores = lambda: 16
def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024
path, options = sys.argv[1], json.loads(sys.argv[2])
if options.pop("cold"):
    for file in Path(path).rglob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
dtype = getattr(torch, options.pop("dtype"))
state = {"model": {f"w{n}": torch.full((4096, 4096), -1.0, dtype=dtype) for n in range(5)}}
if options.pop("strided"):
    state["model"] = {key: tensor.t() for key, tensor in state["model"].items()}
small = {"model": {"w0": state["model"]["w0"]}}
holdfast.load(path, small, only=["w0"], **options)  # imports, and whatever is made once
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
holdfast.load(path, state, **options)
peak = status("VmHWM")  # before the comparison, which makes tensors of its own
assert all((tensor == int(key[1:])).all() for key, tensor in state["model"].items())
print(peak - before)
"""


@pytest.mark.full
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("kind", ["plain", "cold", "cast", "strided"])
@pytest.mark.parametrize("memory_bytes", [32_000_000, 256_000_000])
def test_the_memory_of_a_load_is_bounded(tmp_path: Path, kind: str, memory_bytes: int, verify: bool) -> None:
    holdfast.save(tmp_path / "a", {"model": {f"w{n}": torch.full((4096, 4096), float(n)) for n in range(5)}})
    options: dict[str, Any] = {
        "verify": verify,
        "memory_bytes": memory_bytes,
        "cold": kind == "cold",
        "cast": kind == "cast",
    }
    options |= {"dtype": "bfloat16" if kind == "cast" else "float32", "strided": kind == "strided"}
    command = [sys.executable, "-c", BOUNDED, str(tmp_path / "a"), json.dumps(options)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) <= memory_bytes + 8_000_000  # what Python itself allocates
