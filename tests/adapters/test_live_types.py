"""Values with classes of the program: they come back as they were, or the report says as what."""

from __future__ import annotations

import datetime
import functools
from collections import defaultdict, deque, namedtuple
from dataclasses import InitVar, dataclass, field
from enum import Enum, Flag, IntEnum, auto
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple
from zoneinfo import ZoneInfo

import pytest
import torch
from torch import nn

import holdfast
from holdfast.adapters.loading.tree_targets import decode_references
from holdfast.format.typed_values import TypedValue


class Mode(Enum):
    TRAIN = auto()
    TEST = auto()


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Part(Flag):
    HEAD = auto()
    BODY = auto()


class Place(NamedTuple):
    epoch: int
    sample: Any


@dataclass
class Settings:
    rate: float
    mode: Mode = Mode.TRAIN
    where: Path = Path("data")
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made = True


@dataclass(frozen=True, slots=True)
class Frozen:
    weight: torch.Tensor
    name: str = ""


BERLIN = ZoneInfo("Europe/Berlin")
VALUES: list[Any] = [
    Path("a/b"),
    PurePosixPath("c"),
    datetime.datetime(2026, 11, 18, 13, 5, 7, 9),
    datetime.datetime(2026, 11, 18, 13, tzinfo=datetime.UTC),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN),
    datetime.date(2026, 11, 18),
    datetime.time(13, 5, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    datetime.timedelta(days=-1, microseconds=3),
    deque([1, (2, 3)], maxlen=5),
    deque(),
    torch.bfloat16,
    torch.device("cuda:1"),
    torch.device("cpu"),
]
CLASSES: list[Any] = [
    Mode.TEST,
    Level.HIGH,
    Part.HEAD | Part.BODY,
    Place(3, Mode.TRAIN),
    defaultdict(list, {"a": [1], 2: [Mode.TEST]}),
    {"deep": [Place(3, torch.float16), {"deeper": Place(Level.LOW, None)}]},
]


def reloaded(tmp_path: Path, value: Any, live: Any) -> tuple[Any, holdfast.LoadReport]:
    state = {"value": live}
    holdfast.save(tmp_path / "s", {"value": value})
    report = holdfast.load(tmp_path / "s", state)
    return state["value"], report


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_of_the_standard_library_and_torch_come_back_into_any_live_value(tmp_path: Path, value: Any) -> None:
    for live in (None, value):
        found, report = reloaded(tmp_path, value, live)
        assert found == value and type(found) in (type(value), type(Path()))
        assert not report.notes
        if isinstance(value, deque):
            assert found.maxlen == value.maxlen
        if isinstance(value, datetime.datetime) and value.tzinfo is BERLIN:
            assert found.utcoffset() == value.utcoffset() and found.tzinfo is BERLIN


@pytest.mark.parametrize("value", CLASSES, ids=lambda value: type(value).__name__)
def test_classes_come_from_the_live_value(tmp_path: Path, value: Any) -> None:
    live = (
        {
            Mode.TEST: Mode.TRAIN,
            Level.HIGH: Level.LOW,
            Part.HEAD | Part.BODY: Part.HEAD,
        }.get(value, value)
        if isinstance(value, Enum)
        else value
    )
    found, report = reloaded(tmp_path, value, live)
    assert found == value and type(found) is type(value)
    assert not report.notes


@pytest.mark.parametrize(
    ("value", "plain", "kind"),
    [
        (Mode.TEST, 2, "an enum"),
        (Place(1, 2), (1, 2), "a named tuple"),
        (Settings(0.5), {"rate": 0.5, "mode": 1, "where": Path("data"), "notes": []}, "a dataclass"),
        (defaultdict(int, {"a": 1}), {"a": 1}, "a defaultdict"),
    ],
)
def test_without_a_live_class_it_is_plain_data_and_a_note_says_so(
    tmp_path: Path, value: Any, plain: Any, kind: str
) -> None:
    found, report = reloaded(tmp_path, value, None)
    assert found == plain and type(found) is type(plain)
    assert any(f"value: saved as {kind}, the live value is NoneType: loaded as" in note for note in report.notes)
    opened = holdfast.open(tmp_path / "s").value("value")
    assert opened == plain


def test_a_live_dataclass_is_filled_where_it_is(tmp_path: Path) -> None:
    live = Settings(0.0, notes=["x"])
    held, notes = live, live.notes
    found, _ = reloaded(tmp_path, Settings(0.25, Mode.TEST, Path("z"), ["a", "b"]), live)
    assert found is held and live == Settings(0.25, Mode.TEST, Path("z"), ["a", "b"]) and live.notes is notes
    assert live.made


def test_a_frozen_dataclass_keeps_its_tensor_and_is_replaced(tmp_path: Path) -> None:
    live = Frozen(torch.zeros(3))
    weight = live.weight
    found, _ = reloaded(tmp_path, Frozen(torch.arange(3.0), "new"), live)
    assert found.name == "new" and found.weight is weight and torch.equal(weight, torch.arange(3.0))
    assert live.name == ""


def test_tensors_inside_deques_named_tuples_and_defaultdicts_are_filled_in_place(tmp_path: Path) -> None:
    def tree(value: float) -> dict[str, Any]:
        return {
            "queue": deque([torch.full((2,), value)], 4),
            "place": Place(int(value), torch.full((2,), value)),
            "by_name": defaultdict(list, {"a": [torch.full((2,), value)]}),
        }

    live = tree(0.0)
    held = (live["queue"], live["queue"][0], live["place"].sample, live["by_name"], live["by_name"]["a"][0])
    found, _ = reloaded(tmp_path, tree(7.0), live)
    assert held == (
        found["queue"],
        found["queue"][0],
        found["place"].sample,
        found["by_name"],
        found["by_name"]["a"][0],
    )
    assert all(torch.equal(tensor, torch.full((2,), 7.0)) for tensor in (held[1], held[2], held[4]))
    assert found["place"].epoch == 7 and found["by_name"].default_factory is list


def test_a_class_that_changed_is_a_mismatch_and_touches_nothing(tmp_path: Path) -> None:
    other = namedtuple("other", ["epoch", "batch"])
    text = "other has no field sample; the field batch of other was not saved"
    state: dict[str, Any] = {"value": other(0, 0), "tensor": torch.zeros(2)}
    holdfast.save(tmp_path / "s", {"value": Place(1, 2), "tensor": torch.ones(2)})
    with pytest.raises(holdfast.Mismatch, match=text):
        holdfast.load(tmp_path / "s", state)
    assert state["value"] == other(0, 0) and not state["tensor"].any()
    with pytest.warns(holdfast.HoldfastWarning):
        report = holdfast.load(tmp_path / "s", state, strict=False)
    assert state["value"] == other(0, 0) and state["tensor"].all() and any(text in line for line in report.mismatched)


def test_an_enum_is_found_by_its_name_then_by_its_value(tmp_path: Path) -> None:
    renumbered = Enum("renumbered", {"TEST": 1, "TRAIN": 2})
    renamed = Enum("renamed", {"LEARN": 1, "EVAL": 2})
    gone = Enum("gone", {"A": 5})
    assert reloaded(tmp_path, Mode.TEST, renumbered.TRAIN)[0] is renumbered.TEST
    assert reloaded(tmp_path, Mode.TEST, renamed.LEARN)[0] is renamed.EVAL
    with pytest.raises(holdfast.Mismatch, match=r"value: gone has no member TEST or value 2"):
        reloaded(tmp_path, Mode.TEST, gone.A)


@dataclass
class WithPseudoFields:
    """A dataclass with annotations that are no fields of its objects."""

    limit: ClassVar[int] = 3
    rows: int
    scale: InitVar[int] = 2


def test_class_variables_and_arguments_of_a_dataclass_are_no_fields(tmp_path: Path) -> None:
    state = {"settings": WithPseudoFields(5)}
    holdfast.save(tmp_path / "x", state)
    state["settings"].rows = 1
    holdfast.load(tmp_path / "x", state)
    assert state["settings"] == WithPseudoFields(5)


class Counter:
    """A stateful object whose state has classes."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"mode": Mode.TRAIN, "place": Place(0, torch.zeros(2)), "kind": torch.float32}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class WithExtra(nn.Linear):
    mode = Mode.TRAIN

    def get_extra_state(self) -> Any:
        return {"mode": self.mode}

    def set_extra_state(self, state: Any) -> None:
        self.mode = state["mode"]


def test_stateful_objects_extra_states_and_options_get_their_classes(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        model = WithExtra(2, 2)
        optimizer = torch.optim.SGD([{"params": model.parameters(), "mode": Mode.TRAIN, "kind": torch.float32}], lr=0.1)
        return {"model": model, "optimizer": optimizer, "counter": Counter()}

    saved, live = made(), made()
    saved["model"].mode = Mode.TEST
    saved["optimizer"].param_groups[0].update(mode=Mode.TEST, kind=torch.float16)
    saved["counter"].state = {"mode": Mode.TEST, "place": Place(4, torch.ones(2)), "kind": torch.int8}
    holdfast.save(tmp_path / "s", saved)
    report = holdfast.load(tmp_path / "s", live)
    assert live["model"].mode is Mode.TEST and not report.notes
    assert live["optimizer"].param_groups[0]["mode"] is Mode.TEST
    assert live["optimizer"].param_groups[0]["kind"] is torch.float16
    assert live["counter"].state["mode"] is Mode.TEST and live["counter"].state["kind"] is torch.int8
    assert type(live["counter"].state["place"]) is Place and live["counter"].state["place"].sample.all()


def test_what_still_cannot_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    class Zone(datetime.tzinfo):
        def utcoffset(self, when: Any) -> datetime.timedelta:
            return datetime.timedelta(hours=1)

        def dst(self, when: Any) -> None:
            return None

        def tzname(self, when: Any) -> str:
            return "zone"

    @dataclass
    class Unset:
        value: int = field(init=False)

    for value, text in [
        ({"x": object()}, r"value\.x: a value of type builtins\.object cannot be stored"),
        (datetime.datetime(2026, 1, 1, tzinfo=Zone()), "time zone .*Zone cannot be stored"),
        (Unset(), "the field value of .*Unset is not set"),
    ]:
        with pytest.raises(holdfast.Unsupported, match=text):
            holdfast.save(tmp_path / "s", {"value": value})


@dataclass(frozen=True)
class Key:
    number: int


@pytest.mark.parametrize(
    "key", [Key(1), Mode.TEST, Place(1, 2), (1, Mode.TEST), (1, (2, (Mode.TEST,))), torch.float16], ids=repr
)
def test_a_class_of_the_program_as_a_key_or_in_a_set_is_refused(tmp_path: Path, key: Any) -> None:
    for value in ({key: 2}, {key}, defaultdict(int, {key: 1})):
        with pytest.raises(holdfast.Unsupported, match="as a key or in a set cannot be stored"):
            holdfast.save(tmp_path / "s", {"value": value})


class Precision(Enum):
    HALF = torch.float16
    FULL = torch.float32


def test_an_enum_whose_value_is_not_json_is_found_by_its_name(tmp_path: Path) -> None:
    found, report = reloaded(tmp_path, Precision.HALF, Precision.FULL)
    assert found is Precision.HALF and not report.notes
    assert reloaded(tmp_path, Precision.HALF, None)[0] == "HALF"


def test_a_stand_in_of_holdfast_s_own_is_not_stored(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match="TypedValue cannot be stored"):
        holdfast.save(tmp_path / "s", {"value": TypedValue("$dtype", {"text": "int8"})})


class Box(dict[str, int]):
    pass


@dataclass
class Output(Box):
    loss: int = 0


@dataclass
class Stateful:
    number: int

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def test_containers_that_are_dataclasses_and_nested_stateful_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match="Output is a dataclass and a container"):
        holdfast.save(tmp_path / "s", {"value": Output(3)})
    for order in ({"s": Stateful(1), "t": torch.ones(1)}, {"t": torch.ones(1), "s": Stateful(1)}):
        with pytest.raises(holdfast.Unsupported, match="top level of the state"):
            holdfast.save(tmp_path / "s", {"value": order})


@dataclass(frozen=True)
class Squared:
    number: int

    @functools.cached_property
    def square(self) -> int:
        return self.number**2


def test_what_a_dataclass_computed_from_its_fields_is_forgotten(tmp_path: Path) -> None:
    live = Squared(2)
    assert live.square == 4
    found, _ = reloaded(tmp_path, Squared(5), live)
    assert (found.number, found.square, live.square) == (5, 25, 4)


@dataclass
class Older:
    rate: float = 0.0


@dataclass
class Newer:
    rate: float = 1.0
    decay: float = 2.0


def test_a_field_that_was_not_saved_is_a_mismatch_and_the_others_load_without_strict(tmp_path: Path) -> None:
    state = {"value": Newer(), "other": 1}
    holdfast.save(tmp_path / "s", {"value": Older(0.5), "other": 2})
    with pytest.raises(holdfast.Mismatch, match="the field decay of Newer was not saved"):
        holdfast.load(tmp_path / "s", state)
    with pytest.warns(holdfast.HoldfastWarning):
        holdfast.load(tmp_path / "s", state, strict=False)
    assert state == {"value": Newer(0.5, 2.0), "other": 2}


class Collective:
    """Counts how often its state is asked for: on several ranks that may be a collective."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"mode": Mode.TRAIN, "plain": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_load_asks_for_the_state_of_an_object_once(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "s", {"value": Collective()})
    live = Collective()
    holdfast.load(tmp_path / "s", {"value": live})
    assert live.calls == 1 and live.state == {"mode": Mode.TRAIN, "plain": 1}


def test_options_and_extra_states_that_do_not_fit_are_told(tmp_path: Path) -> None:
    gone = Enum("gone", {"A": 5})

    def made(mode: Any) -> dict[str, Any]:
        model = WithExtra(2, 2)
        model.mode = mode
        optimizer = torch.optim.SGD([{"params": model.parameters(), "mode": mode}], lr=0.1)
        return {"model": model, "optimizer": optimizer}

    holdfast.save(tmp_path / "s", made(Mode.TEST))
    with pytest.raises(holdfast.Mismatch) as raised:
        holdfast.load(tmp_path / "s", made(gone.A))
    assert "model._extra_state.mode: gone has no member TEST" in str(raised.value)
    assert "optimizer.param_groups.mode: gone has no member TEST" in str(raised.value)
    report = holdfast.load(tmp_path / "s", made(None))
    assert len([note for note in report.notes if "saved as an enum" in note]) == 2


HOSTILE: list[Any] = [
    {"$enum": [["x"], 1]},
    {"$enum": ["x", {"$dtype": "int8"}]},
    {"$set": [{"$dataclass": {"a": 1}}]},
    {"$set": [{"$namedtuple": {"a": [1]}}]},
    {"$dict": [[{"$defaultdict": []}, 1]]},
    {"$deque": [True, []]},
    {"$deque": [2, "abc"]},
]


@pytest.mark.parametrize("value", HOSTILE, ids=str)
def test_hostile_values_are_damage_before_anything_is_touched(value: Any) -> None:
    with pytest.raises(holdfast.Damaged):
        decode_references({"a": value}, "state.json")
