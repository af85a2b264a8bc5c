"""Bits of tensors with their scales."""

import pytest

from holdfast.core.errors import InvalidArgument
from holdfast.layout.box import Box
from holdfast.sizes.element_formats import format_named, plain_format


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp32", 300 * 200 * 32),
        ("bfloat16", 300 * 200 * 16),
        ("fp8", 300 * 200 * 8 + 32),
        ("fp8-row", 300 * 200 * 8 + 300 * 32),
        ("fp8-block128", 300 * 200 * 8 + 3 * 2 * 32),
        ("mxfp8", 300 * 200 * 8 + 300 * 7 * 8),
        ("mxfp4", 300 * 200 * 4 + 300 * 7 * 8),
        ("nvfp4", 300 * 200 * 4 + 300 * 13 * 8 + 32),
    ],
)
def test_bits_of_a_matrix(name, bits):
    shape = (300, 200)
    assert format_named(name, "compute").bits_of([Box.full(shape)], shape) == bits
    assert format_named(name, "compute").bits_of([], shape) == 0


def test_shards_have_the_scales_of_the_blocks_that_they_touch():
    block = format_named("fp8-block128", "compute")
    assert block.bits_of([Box((100, 0), (100, 200))], (300, 200)) == 100 * 200 * 8 + 2 * 2 * 32
    stacked = (4, 128, 256)
    assert block.bits_of([Box.full(stacked)], stacked) == 4 * 128 * 256 * 8 + 4 * 1 * 2 * 32
    assert format_named("fp8-row", "compute").bits_of([Box((0, 50), (300, 50))], (300, 200)) == 300 * 50 * 8 + 300 * 32


def test_formats_without_scales():
    assert plain_format("torch.float16", "param").stored.name == "float16"
    with pytest.raises(InvalidArgument, match="format of copies"):
        _ = format_named("fp8-row", "compute").stored
