"""Numbers in a row that look alike are one entry; gaps, other looks, names and huge numbers are not."""

from holdfast.core.alike_numbers import folded_numbers


def fold(*items, unfold=False):
    return [names for names, _ in folded_numbers(items, lambda look: look, unfold=unfold)]


def test_alike_neighbors_are_one():
    assert fold(("0", "x"), ("1", "x"), ("2", "y"), ("3", "y"), ("5", "y")) == [["0", "1"], ["2", "3"], ["5"]]


def test_names_are_never_folded():
    assert fold(("a", 1), ("b", 1), ("0", 1), ("\u0661", 1), ("1" * 30, 1)) == [
        ["a"],
        ["b"],
        ["0"],
        ["\u0661"],
        ["1" * 30],
    ]


def test_nothing_is_folded_when_asked():
    assert fold(("0", 1), ("1", 1), unfold=True) == [["0"], ["1"]]
