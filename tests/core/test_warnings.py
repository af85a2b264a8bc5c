"""A warning points to the nearest line that is not Holdfast's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from holdfast.core import warnings as module
from holdfast.core.warnings import HoldfastWarning, PendingWarnings, warn


def through_the_package(depth: int) -> Any:
    """Return a function that warns below so many frames of a file of the package."""
    lines = ["def call0(): warn('look here')"]
    lines += [f"def call{number}(): call{number - 1}()" for number in range(1, depth + 1)]
    names: dict[str, Any] = {"warn": warn}
    exec(compile("\n".join(lines), str(Path(module.__file__).with_name("made.py")), "exec"), names)
    return names[f"call{depth}"]


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_the_frames_of_the_package_are_skipped(depth: int) -> None:
    call = through_the_package(depth)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    (warning,) = caught
    assert warning.category is HoldfastWarning and str(warning.message) == "look here"
    assert warning.filename == __file__


def test_a_call_from_outside_is_the_place_itself() -> None:
    with pytest.warns(HoldfastWarning, match="outside") as caught:
        warn("outside")
    assert caught[0].filename == __file__


def test_a_folder_whose_name_begins_like_the_package_is_outside() -> None:
    names: dict[str, Any] = {"warn": warn}
    beside = f"{Path(module.__file__).parents[1]}-plugin/made.py"
    exec(compile("def call(): warn('beside')", beside, "exec"), names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names["call"]()
    assert caught[0].filename == beside


@pytest.mark.parametrize("framework", ["transformers.trainer", "torch.optim.optimizer", "contextlib"])
def test_the_frames_of_frameworks_are_skipped(framework: str) -> None:
    names: dict[str, Any] = {"call0": through_the_package(1), "__name__": framework}
    exec(compile("def call(): call0()", "framework.py", "exec"), names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names["call"]()
    assert caught[0].filename == __file__


def emitted(pending: PendingWarnings) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pending.emit()
    return [str(warning.message) for warning in caught]


def test_pending_warnings_are_emitted_once_and_in_order() -> None:
    pending = PendingWarnings()
    pending.add("a")
    pending.add_once("b")
    pending.add("a")
    assert pending.mentions("b") and not pending.mentions("c")
    assert emitted(pending) == ["a", "b", "a"]
    assert emitted(pending) == [] and not pending.mentions("b")


def test_a_text_added_once_is_never_added_that_way_again() -> None:
    pending = PendingWarnings()
    pending.add_once("b")
    pending.add_once("b")
    assert emitted(pending) == ["b"]
    pending.add_once("b")
    assert emitted(pending) == []


def test_cleared_warnings_are_not_emitted() -> None:
    pending = PendingWarnings()
    pending.add("a")
    pending.clear()
    assert emitted(pending) == []
