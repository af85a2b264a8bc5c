import pytest

from holdfast.merging.donor_files import with_fields


def test_only_the_changed_field_is_rewritten():
    data = b'{\n    "z": 1.50e3,\n    "a": {"b": [1]},\n    "torch_dtype": "float32"\n}\n'
    assert with_fields(data, "config.json", {}, "float32") == data
    expected = b'{\n    "z": 1500.0,\n    "a": {\n        "b": [\n            1\n        ]\n    },\n    '
    assert (
        with_fields(data, "config.json", {"n": 2}, "bfloat16")
        == expected + b'"torch_dtype": "bfloat16",\n    "n": 2\n}\n'
    )


def test_nested_configs_get_the_dtype_and_quantization_keeps_its_own():
    data = b'{"text_config": {"dtype": "float32"}, "quantization_config": {"dtype": "int8"}, "dtype": "float32"}'
    assert with_fields(data, "config.json", {}, "float16") == data.replace(b"float32", b"float16")


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_the_end_of_the_file_stays(ending):
    assert with_fields(b'{\n "a": 1\n}' + ending, "config.json", {"a": 2}) == b'{\n "a": 2\n}' + ending


def test_a_config_without_a_dtype_gets_one():
    assert with_fields(b"{}", "config.json", {}, "float16") == b'{"torch_dtype": "float16"}'
