"""Durations as people write them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from holdfast.core.durations import Duration, parse_seconds
from holdfast.core.errors import InvalidArgument


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (9_999_999_999, 9_999_999_999.0),
        (timedelta(minutes=2, milliseconds=500), 120.5),
        ("45s", 45.0),
        ("90m", 5400.0),
        ("36h", 129_600.0),
        ("2d", 172_800.0),
        ("1w", 604_800.0),
        ("1.5h", 5400.0),
        (" 3 d ", 259_200.0),
    ],
)
def test_a_duration_in_seconds(duration: Duration, seconds: float) -> None:
    found = parse_seconds(duration, "the deadline")
    assert found == seconds and isinstance(found, float)


@pytest.mark.parametrize("text", ["", "soon", "10", "5x", "1h30m", "-1h", "h", ".5h"])
def test_a_text_that_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^the deadline: .* is not a duration: .*'90m', '36h'"):
        parse_seconds(text, "the deadline")


@pytest.mark.parametrize("value", [0, -1, True, None, [1], float("nan"), float("inf"), 10**10, timedelta(0), "0s"])
def test_a_value_that_is_not_positive_and_finite_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^the deadline: .* is not a positive duration$"):
        parse_seconds(value, "the deadline")
