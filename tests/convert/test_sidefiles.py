import json

import pytest

from holdfast.convert.mapping import MappingOptions
from holdfast.convert.sidefiles import with_config

GIVEN = {"model_type": "llama", "vocab_size": 5}


@pytest.mark.parametrize("written", [None, "llama-from-megatron", "a -> b"])
@pytest.mark.parametrize("form", ["hf", "holdfast"])
def test_a_given_config_goes_along(written, form):
    files = with_config({"tokenizer.json": b"{}"}, form, MappingOptions(written, config=GIVEN))
    assert json.loads(files.pop("config.json")) == GIVEN
    assert files == {"tokenizer.json": b"{}"}


def test_the_sources_own_config_stays():
    assert with_config({"config.json": b"{}"}, "hf", MappingOptions(config=GIVEN)) == {"config.json": b"{}"}


@pytest.mark.parametrize(
    ("form", "mapping"),
    [
        ("hf", MappingOptions()),
        ("dcp", MappingOptions(config=GIVEN)),
        ("hf", MappingOptions("llama-megatron", config=GIVEN)),
        ("hf", MappingOptions("llama-from-megatron", reverse=True, config=GIVEN)),
    ],
)
def test_no_config_where_none_is_given_or_transformers_cannot_open_the_result(form, mapping):
    assert with_config({}, form, mapping) == {}
