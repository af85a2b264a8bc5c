import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import Damaged
from holdfast.format.index import decode_index, encode_index

FILE = "model-00001-of-00002.safetensors"
KEYS = st.text("abc.019é/", min_size=1, max_size=10)


def test_the_text_is_what_transformers_writes():
    weight_map = {"b": FILE, "a": FILE}
    index = {"metadata": {"total_size": 12}, "weight_map": weight_map}
    assert encode_index(weight_map, 12).decode() == json.dumps(index, indent=2, sort_keys=True) + "\n"


@given(st.dictionaries(KEYS, st.sampled_from([FILE, "model-00002-of-00002.safetensors", "ema/model.safetensors"])))
def test_a_weight_map_round_trips(weight_map):
    assert decode_index(encode_index(weight_map, 0), "w") == weight_map


def test_unknown_fields_of_other_writers_are_allowed():
    data = json.dumps({"metadata": {"total_size": 1, "format": "pt"}, "extra": [], "weight_map": {"a": FILE}})
    assert decode_index(data.encode(), "w") == {"a": FILE}


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../model.safetensors",
        "a/../../model.safetensors",
        "a/b/c.safetensors",
        "/etc/passwd",
        "a\0.safetensors",
        "a\nb",
        "a\\b",
        "..\\a",
        "%2e%2e/a",
        "C:a",
        ".hidden",
        "a b",
        "n" * 300,
        "a\x1b[31m",
        "a/",
        "\u2024\u2024/a",
    ],
)
def test_a_file_name_that_is_not_plain_is_damage(name):
    with pytest.raises(Damaged, match=r"^run/index: .* is not an allowed file name$"):
        decode_index(json.dumps({"weight_map": {"good": FILE, "a": name}}).encode(), "run/index")


@pytest.mark.parametrize("name", [None, 1, True, [FILE], {"file": FILE}])
def test_a_file_name_that_is_no_text_is_damage(name):
    with pytest.raises(Damaged, match="'a' is not mapped to a file name"):
        decode_index(json.dumps({"weight_map": {"a": name}}).encode(), "w")


@pytest.mark.parametrize("key", ["", "a\nb", "a\0", "\x1b[2J", "__metadata__", "k" * 1025, "a\x9b"])
def test_a_hostile_key_is_damage(key):
    with pytest.raises(Damaged, match=r"^w: the key ") as caught:
        decode_index(json.dumps({"weight_map": {key: FILE}}).encode(), "w")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"weight_map":null}',
        b'{"weight_map":[]}',
        b'{"weight_map":"a"}',
        b'{"weight_map":{"a":"b","a":"b"}}',
        b'{"weight_map":{}}x',
        b'{"weight_map":NaN}',
        b'{"weight_map":' + b'{"a":' * 100_000,
        b"\xff\xfe",
    ],
)
def test_what_is_not_an_index_is_damage(data):
    with pytest.raises(Damaged, match=r"^w: "):
        decode_index(data, "w")


def test_half_of_a_surrogate_pair_is_damage():
    with pytest.raises(Damaged, match="not valid JSON"):
        decode_index(json.dumps({"weight_map": {"a\ud800": FILE}}).encode(), "w")
