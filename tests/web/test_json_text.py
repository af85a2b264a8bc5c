"""JSON for the page: no character that ends a script, numbers that JSON lacks as text, everything else as it was."""

import json

from hypothesis import given
from hypothesis import strategies as st

from holdfast.web.json_text import to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_and_markup_does_not_get_out(value):
    text = to_json(value)
    assert json.loads(text) == value
    assert all(32 <= byte < 127 for byte in text)
    assert not set(text) & set(b"<>&")


def test_numbers_that_json_lacks_are_text():
    value = {"a": [float("nan"), float("inf")], "b": (-float("inf"), 1.5)}
    assert json.loads(to_json(value)) == {"a": ["NaN", "Infinity"], "b": ["-Infinity", 1.5]}
