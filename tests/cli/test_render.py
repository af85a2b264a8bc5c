import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.render import clean, print_table, size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1500, "1.50 kB"),
        (5 * 10**9, "5.00 GB"),
        (2 * 10**12, "2.00 TB"),
        (3 * 10**15, "3000.00 TB"),
    ],
)
def test_sizes_are_in_decimal_units(count, text):
    assert size_text(count) == text


@given(st.text())
def test_cleaned_text_is_printable(text):
    assert clean(text).isprintable()


@given(st.text("abc .é字"))
def test_printable_text_stays_as_it_is(text):
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\x1b[31m", r"a\x1b[31m"), ("\n", r"\x0a"), ("\x9b", r"\x9b"), ("\u202e", r"\x202e"), ("\x7f\0", r"\x7f\x00")],
)
def test_control_characters_are_made_visible(text, expected):
    assert clean(text) == expected


def test_a_table_is_aligned_and_cleaned(capsys):
    print_table(["step", "name"], [["7", "a\x1bb"], ["1000", "c"]], right=(0,))
    assert capsys.readouterr().out == "step  name\n   7  a\\x1bb\n1000  c\n"


def test_a_table_without_rows_is_its_head(capsys):
    print_table(["step", "name"], [])
    assert capsys.readouterr().out == "step  name\n"
