"""Names of tensors that an adapter stores whole, as PEFT loads them."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Unsupported
from holdfast.merging.lora.whole_tensors import whole_tensors

KEYS = [
    "a.q.weight",
    "a.q.bias",
    "a.input_norm.weight",
    "norm.weight",
    "a.scale",
    "b.norm.bias",
    "b.ln.weight",
    "b.ln.bias",
]


def test_the_bias_of_a_layer_with_matrices_is_that_of_the_wrapped_layer() -> None:
    found = whole_tensors(["a.q.bias"], ["a.q.weight"], KEYS)
    assert (found.names, found.modules, found.biases) == ({"a.q.base_layer.bias": "a.q.bias"}, (), True)


def test_a_bias_alone_needs_no_copy_of_its_module() -> None:
    found = whole_tensors(["a.q.bias"], [], KEYS)
    assert (found.names, found.modules, found.biases) == ({"a.q.bias": "a.q.bias"}, (), True)


def test_a_saved_module_has_all_its_tensors() -> None:
    found = whole_tensors(["b.ln.weight"], [], KEYS)
    assert (found.names, found.modules, found.biases) == (
        {"b.ln.weight": "b.ln.weight", "b.ln.bias": "b.ln.bias"},
        ("b.ln",),
        False,
    )


@pytest.mark.parametrize("key", ["norm.weight", "a.scale"])
def test_a_module_that_peft_would_not_find_alone_is_not_copied(key: str) -> None:
    """The names of two other modules end with "norm"; a module with others in it."""
    assert whole_tensors([key], [], KEYS).modules == ()
    assert whole_tensors([key], [], KEYS).names == {key: key}


def test_a_tensor_without_a_module_is_refused() -> None:
    with pytest.raises(Unsupported, match="'extra' was changed, but belongs to no module"):
        whole_tensors(["extra"], [], [*KEYS, "extra"])
