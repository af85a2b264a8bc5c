"""Trees after a load: exactly what was saved, in the live objects wherever they can hold it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.adapters.loading.tree_targets import TreeAssembly, decode_references, live_leaves
from holdfast.core.errors import LayoutError


def through(path: Path, saved: dict[str, Any], live: dict[str, Any], **options: Any) -> holdfast.LoadReport:
    holdfast.save(path / "x", saved)
    return holdfast.load(path / "x", live, **options)


def test_numpys_random_state_comes_back(tmp_path: Path) -> None:
    saved = np.random.RandomState(1)
    live = np.random.RandomState(2)
    state = {"random": live.get_state(legacy=True)}
    through(tmp_path, {"random": saved.get_state(legacy=True)}, state)
    live.set_state(state["random"])
    assert live.randint(1 << 30, size=9).tolist() == saved.randint(1 << 30, size=9).tolist()


def test_an_array_at_the_top_is_filled_in_place(tmp_path: Path) -> None:
    live = np.zeros(5)
    state = {"a": live}
    report = through(tmp_path, {"a": np.arange(5.0)}, state)
    assert state["a"] is live and live.tolist() == [0, 1, 2, 3, 4]
    assert report.loaded == ("a: a",)


def test_lists_and_tuples_get_numbers_too(tmp_path: Path) -> None:
    tensor = torch.zeros(2)
    items: list[Any] = [torch.zeros(2), 7]
    state: dict[str, Any] = {"l": items, "t": (tensor, 7, "old")}
    through(tmp_path, {"l": [torch.ones(2), 5], "t": (torch.ones(2), 5, None)}, state)
    assert state["l"] is items and items[1] == 5 and items[0].tolist() == [1, 1]
    assert state["t"][0] is tensor and tensor.tolist() == [1, 1] and state["t"][1:] == (5, None)


def test_a_dict_does_not_keep_stale_keys(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"stale": [1, 2], "t": torch.zeros(1)}
    live: dict[str, Any] = {"inner": inner, "stale": 1, "n": 0}
    state = {"d": live}
    through(tmp_path, {"d": {"inner": {"t": torch.ones(1), "new": {}}, "n": 2}}, state)
    assert state["d"] is live and live["inner"] is inner
    assert list(live) == ["inner", "n"] and live["n"] == 2
    assert list(inner) == ["t", "new"] and inner["t"].tolist() == [1] and inner["new"] == {}


@pytest.mark.parametrize(
    "make",
    [
        lambda v: np.asfortranarray(np.full((3, 4), v, np.float32)),
        lambda v: np.full((6, 8), v, np.float32)[::2, ::2],
        lambda v: np.full((3, 4), v, ">f4"),
        lambda v: np.full((3, 4), v, np.float32)[::-1],
        lambda v: np.full((4, 3), v, np.float32).T,
        lambda v: np.frombuffer(bytearray(50), np.uint8)[2:].view("<f4").reshape(3, 4) + np.float32(v),
        lambda v: np.array(v, np.float32),
        lambda v: np.full((0, 3), v, np.float32),
        lambda v: np.full((2, 2), v, np.complex128),
        lambda v: np.full(3, v, np.uint64),
        lambda v: np.full(3, v, bool),
    ],
)
def test_arrays_of_every_layout_are_filled_in_the_users_own_memory(tmp_path: Path, make: Any) -> None:
    live, saved = make(0), make(1)
    base = live.base if live.base is not None else live
    state = {"d": {"a": live}, "top": make(0)}
    through(tmp_path, {"d": {"a": saved}, "top": saved}, state)
    assert state["d"]["a"] is live and (live.base if live.base is not None else live) is base
    assert live.dtype == saved.dtype and (live == saved).all() and (state["top"] == saved).all()


def test_elements_between_those_of_a_view_are_not_touched(tmp_path: Path) -> None:
    whole = np.zeros(10)
    through(tmp_path, {"a": np.ones(5)}, {"a": whole[::2]})
    assert whole.tolist() == [1, 0] * 5


def test_a_read_only_array_is_replaced_where_it_stands(tmp_path: Path) -> None:
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    live = {"list": [frozen, frozen], "tuple": (frozen,)}
    state: dict[str, Any] = {"d": live, "top": frozen}
    one, two = np.full(3, 1.0), np.full(3, 2.0)
    through(tmp_path, {"d": {"list": [one, two], "tuple": (two,)}, "top": one}, state)
    assert state["d"] is live and not frozen.any() and (state["top"] == one).all()
    assert [array.tolist() for array in (*live["list"], *live["tuple"])] == [[1.0] * 3, [2.0] * 3, [2.0] * 3]


def test_a_read_only_array_is_replaced_also_where_only_it_was_asked_for(tmp_path: Path) -> None:
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    state: dict[str, Any] = {"d": {"a": frozen, "n": 1}}
    through(tmp_path, {"d": {"a": np.ones(2), "n": 2}}, state, only=["d/a"])
    assert state["d"]["a"].tolist() == [1, 1] and state["d"]["n"] == 1


def test_kinds_of_containers_come_back(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "ordered": OrderedDict([("z", torch.ones(1)), ("a", 1)]),
        "counter": Counter("aab"),
        "keys": {(1, "x"): torch.ones(1), None: 2, 3: [torch.ones(1)]},
        "size": torch.Size([2, 3]),
        "nothing": [None, True, [], (), {}, set(), {1, 2}, frozenset({3}), b"x", 1 + 2j, float("inf"), -0.0],
        "numpy": [np.float32(1.5), np.int8(-3), np.bool_(True), torch.ones(1)],
    }
    live: dict[str, Any] = {
        "ordered": OrderedDict([("a", 0), ("z", torch.zeros(1))]),
        "counter": Counter("zzz"),
        "keys": {None: 0, 3: [torch.zeros(1)], (1, "x"): torch.zeros(1)},
        "size": (),
        "nothing": 5,
        "numpy": [0, 0, 0, torch.zeros(1)],
    }
    through(tmp_path, {"d": saved, **{key: saved[key] for key in saved}}, {"d": live, **live})
    assert list(live["ordered"]) == ["z", "a"] and isinstance(live["ordered"], OrderedDict)
    assert live["counter"] == Counter("aab") and isinstance(live["counter"], Counter)
    assert live["keys"].keys() == saved["keys"].keys() and live["keys"][3][0].item() == 1
    assert live["size"] == (2, 3)
    assert repr(live["nothing"]) == repr(saved["nothing"])
    assert [type(item) for item in live["numpy"]] == [type(item) for item in saved["numpy"]]


def test_lists_of_tensors_that_differ_in_length_are_named(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"l": [torch.ones(1), torch.ones(1)], "d": {"in": [torch.ones(1)]}})
    short: dict[str, Any] = {"l": [torch.zeros(1)], "d": {"in": [torch.zeros(1), torch.zeros(1)]}}
    with pytest.raises(holdfast.Mismatch) as caught:
        holdfast.load(tmp_path / "x", short)
    assert "not in the live state: l: 1" in str(caught.value)
    assert "missing in the checkpoint: d: in.1" in str(caught.value)
    assert not short["l"][0].any() and not short["d"]["in"][0].any()


def test_a_list_of_numbers_may_have_grown(tmp_path: Path) -> None:
    state = {"d": {"t": torch.zeros(1), "losses": [1.0, 2.0, 3.0]}}
    through(tmp_path, {"d": {"t": torch.ones(1), "losses": [9.0]}}, state)
    assert state["d"]["losses"] == [9.0]


def test_a_tensor_is_not_taken_for_a_number(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"d": {"a": torch.ones(1), "b": 5}})
    text = r"d: a: saved as a tensor or array, but the live value is int(.|\n)*missing in the checkpoint: d: b"
    with pytest.raises(holdfast.Mismatch, match=text):
        holdfast.load(tmp_path / "x", {"d": {"a": 1, "b": torch.zeros(1)}})


def test_what_is_not_filled_stays_and_is_reported_when_not_strict(tmp_path: Path) -> None:
    kept = torch.full((2,), 7.0)
    live: dict[str, Any] = {"a": torch.zeros(1), "kept": kept, "list": [torch.zeros(1), 5, kept], "plain": 1}
    saved = {"a": torch.ones(1), "new": torch.ones(1), "list": [torch.ones(1), 6], "plain": 2, "deep": [torch.ones(1)]}
    with pytest.warns(holdfast.HoldfastWarning, match="d: kept"):
        report = through(tmp_path, {"d": saved}, {"d": live}, strict=False)
    assert report.missing == ("d: kept", "d: list.2") and report.unexpected == ("d: deep.0", "d: new")
    assert (
        live["a"].item() == 1
        and live["kept"] is kept
        and live["plain"] == 2
        and set(live) == {*("a", "kept", "list", "plain")}
    )
    assert live["list"][0].item() == 1 and live["list"][1] == 6 and live["list"][2] is kept


def test_ignored_tensors_stay_in_their_places(tmp_path: Path) -> None:
    ignored = torch.full((1,), 7.0)
    live: dict[str, Any] = {"a": [torch.zeros(1), ignored], "n": 1}
    through(tmp_path, {"d": {"a": [torch.ones(1), torch.ones(1)], "n": 2}}, {"d": live}, ignore=["d/a.1"])
    assert live["a"][0].item() == 1 and live["a"][1] is ignored and ignored.item() == 7 and live["n"] == 2


def test_one_list_in_two_places_becomes_two_where_the_saved_differ(tmp_path: Path) -> None:
    shared: list[Any] = [0]
    live = {"a": shared, "b": shared, "t": torch.zeros(1)}
    through(tmp_path, {"d": {"a": [1], "b": [2], "t": torch.ones(1)}}, {"d": live})
    assert (live["a"], live["b"]) == ([1], [2])


def test_one_tensor_in_two_places_holds_one_value_or_is_an_error(tmp_path: Path) -> None:
    one, two = torch.full((3,), 1.0), torch.full((3,), 2.0)
    shared = torch.zeros(3)
    through(tmp_path, {"d": {"a": one, "b": [one]}}, {"d": {"a": shared, "b": [shared]}})
    assert shared.tolist() == [1, 1, 1]
    with pytest.raises(holdfast.Mismatch, match=r"d: a and d: b\.0 share memory"):
        through(tmp_path, {"d": {"a": one, "b": [two]}}, {"d": {"a": shared, "b": [shared]}})


def test_views_of_one_buffer_are_filled_and_compared(tmp_path: Path) -> None:
    def parts(buffer: torch.Tensor) -> dict[str, Any]:
        return {"views": [buffer[:3], buffer[2:]], "odd": buffer[1::2], "array": buffer.numpy()[:4]}

    buffer = torch.zeros(6)
    through(tmp_path, {"d": parts(torch.arange(6.0)), "e": torch.arange(6.0)}, {"d": parts(buffer), "e": buffer})
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5]
    views = parts(torch.arange(6.0))
    apart = {
        "d": {"views": [view.clone() for view in views["views"]], "odd": views["odd"] + 1, "array": views["array"]}
    }
    with pytest.raises(holdfast.Mismatch, match="share memory"):
        through(tmp_path, apart, {"d": parts(buffer)})


def test_a_weight_that_is_in_the_state_twice_is_compared(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    through(tmp_path, {"model": model, "d": {"w": model.weight}}, {"model": model, "d": {"w": model.weight}})
    other = nn.Linear(2, 2)
    holdfast.save(tmp_path / "x", {"model": model, "d": {"w": other.weight.detach()}})
    with pytest.raises(holdfast.Mismatch, match=r"model: weight and d: w|d: w and model: weight"):
        holdfast.load(tmp_path / "x", {"model": model, "d": {"w": model.weight}})


def test_placeholders_are_replaced_with_what_was_saved(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": None, "d": {}, "l": 0}
    through(tmp_path, {"a": np.arange(3), "d": {"t": torch.ones(2)}, "l": [torch.ones(1), 5]}, state)
    assert state["a"].tolist() == [0, 1, 2] and state["d"]["t"].tolist() == [1, 1] and state["l"][1] == 5


def test_an_array_that_is_a_tensor_now_is_filled_and_noted(tmp_path: Path) -> None:
    state: dict[str, Any] = {"d": {"a": torch.zeros(2), "b": np.zeros(2, np.float32)}}
    report = through(tmp_path, {"d": {"a": np.ones(2, np.float32), "b": torch.ones(2)}}, state)
    assert state["d"]["a"].tolist() == [1, 1] and state["d"]["b"].tolist() == [1, 1]
    assert report.notes == (
        "d: a was saved as a numpy array and is now a tensor",
        "d: b was saved as a tensor and is now a numpy array",
    )


class Dict(dict[str, Any]):
    pass


class Position:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda: Dict(a=torch.ones(1)), "v: .*Dict"),
        (lambda: {"a": {torch.ones(1)}}, r"v\.a.*Tensor"),
        (lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]), "v: a numpy array of dtype"),
        (lambda: {"a": np.array(["text"])}, r"v\.a: a numpy array of dtype"),
        (lambda: {"a": np.array([1], dtype="datetime64[s]")}, r"v\.a: a numpy array of dtype"),
        (lambda: {"a": np.ma.masked_array([1, 2], [False, True])}, r"v\.a: a numpy\.ma.*plain numpy array"),
        (lambda: {"a": np.matrix([[1]])}, r"v\.a: a numpy\.matrix"),
        (lambda: {"a": nn.Linear(1, 1)}, "v.*Linear.*top level of the state"),
        (lambda: [torch.ones(1), nn.Linear(1, 1)], "v.*Linear.*top level of the state"),
        (lambda: {"deep": [{"a": Position()}]}, "v.*Position.*top level of the state"),
        (lambda: {"a": torch.optim.SGD([torch.ones(1)], 0.1)}, "v.*SGD.*top level of the state"),
        (lambda: {"a": torch.ones(2).to_sparse()}, "v: a: .*sparse"),
        (lambda: {"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, "v: a: nested"),
        (lambda: {"a": torch.empty(3, device="meta")}, "v: a.*meta"),
        (lambda: {"a": torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))}, "v: a: .*MaskedTensor"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PendingDeprecationWarning")
def test_what_cannot_come_back_is_refused_by_name(tmp_path: Path, value: Any, named: str) -> None:
    with pytest.raises(holdfast.Unsupported, match=named):
        holdfast.save(tmp_path / "x", {"v": value()})


def test_an_object_inside_of_a_live_dict_is_not_replaced(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"v": {"a": {"at": 5}}})
    with pytest.raises(holdfast.Unsupported, match=r"v: a .*Position inside a dict"):
        holdfast.load(tmp_path / "x", {"v": {"a": Position()}})


def test_a_tensor_whose_storage_was_freed_is_refused(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(holdfast.Unsupported, match=r"v: a: .*has no memory"):
        holdfast.save(tmp_path / "x", {"v": {"a": tensor}})


def test_leaves_that_require_grad_and_inference_tensors_are_filled(tmp_path: Path) -> None:
    leaf = torch.zeros(2, requires_grad=True)
    with torch.inference_mode():
        inference = torch.zeros(2)
    through(tmp_path, {"d": {"a": torch.ones(2), "b": torch.ones(2)}}, {"d": {"a": leaf, "b": inference}})
    assert leaf.tolist() == [1, 1] and leaf.requires_grad and leaf.is_leaf and inference.tolist() == [1, 1]


def test_a_dict_that_is_a_stateful_object_is_asked_for_its_state(tmp_path: Path) -> None:
    class History(dict[str, Any]):
        def state_dict(self) -> dict[str, Any]:
            return {"items": dict(self)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.update(state["items"])

    live = History()
    through(tmp_path, {"h": History(t=torch.ones(1), n=2)}, {"h": live})
    assert live["n"] == 2 and live["t"].item() == 1


def test_a_saved_module_is_not_loaded_as_a_value(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"n": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    holdfast.save(tmp_path / "x", {"model": Extra(1, 1)})
    with pytest.raises(holdfast.Mismatch, match="model: saved as a module"):
        holdfast.load(tmp_path / "x", {"model": None})


def test_keys_that_other_ranks_hold_are_left_out() -> None:
    live = {"a": torch.zeros(1), "n": 1}
    encoded, leaves = live_leaves("d", live)
    assert encoded == {"a": {"$tensor": "a"}, "n": 1}
    merged = {"a": {"$tensor": "a"}, "b": {"$tensor": "b"}, "c": {"x": {"$tensor": "c.x"}, "y": 1}, "m": 2}
    made = TreeAssembly(leaves, frozenset({"a"})).run(decode_references(merged, "d"), live)
    assert made is live and list(live) == ["a", "m"]


def test_dicts_and_lists_without_tensors_stay_the_same_objects(tmp_path) -> None:
    saved = {"position": {"epoch": 2, "seen": [1, 2, 3]}, "order": [3, 1], "counts": Counter("aab")}
    holdfast.save(tmp_path / "a", dict(saved))
    position, order, counts = {"epoch": 0, "seen": [9], "stale": 1}, [0, 0, 0], Counter("zz")
    seen = position["seen"]
    state = {"position": position, "order": order, "counts": counts}
    holdfast.load(tmp_path / "a", state)
    assert state == saved
    assert state["position"] is position and position["seen"] is seen
    assert state["order"] is order and state["counts"] is counts


@pytest.mark.parametrize("other", [lambda a: a[::-1], lambda a: a.view(">f8")], ids=["reversed", "big-endian"])
def test_arrays_of_one_memory_that_are_filled_by_way_of_a_copy_are_refused(tmp_path, other) -> None:
    holdfast.save(tmp_path / "a", {"pair": [np.arange(3.0), np.arange(3.0) * 5]})
    live = np.zeros(3)
    with pytest.raises(LayoutError, match="share memory in the live state"):
        holdfast.load(tmp_path / "a", {"pair": [live, other(live)]})
    assert not live.any()


def test_a_tensor_whose_place_holds_another_value_now_is_reported(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"s": {"a": torch.ones(2), "b": [torch.ones(3), 4], "n": 3}})
    live = {"s": {"a": 5, "b": [None, 1], "n": 1, "extra": torch.zeros(1)}}
    with pytest.raises(holdfast.Mismatch, match="s: a: saved as a tensor or array, but the live value is int"):
        holdfast.load(tmp_path / "c", live, ignore=["extra"])
    live = {"s": {"a": 5, "b": [torch.zeros(3), 1], "n": 1}}
    with pytest.warns(UserWarning, match="s: a: saved as a tensor or array, but the live value is int"):
        report = holdfast.load(tmp_path / "c", live, strict=False)
    assert report.mismatched == ("s: a: saved as a tensor or array, but the live value is int",)
    assert report.unexpected == ()
    assert live["s"]["a"] == 5 and live["s"]["b"][1] == 4 and live["s"]["n"] == 3


def test_the_report_counts_the_other_values_of_trees(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"s": {"a": torch.ones(2), "n": 3}, "t": {"a": torch.ones(2)}})
    report = holdfast.load(tmp_path / "c", {"s": {"a": torch.zeros(2), "n": 1}, "t": {"a": torch.zeros(2)}})
    assert report.values == 1
