import pytest

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument
from holdfast.core.limits import GB, KIB, MIB, parse_bytes

# Bounds of the format: a reader that lowers one refuses checkpoints that others wrote.
FORMAT = {
    "HEADER_BYTES": 16 * 2**20,
    "HEADER_TENSORS": 200_000,
    "TENSOR_RANK": 64,
    "KEY_BYTES": 1024,
    "FILE_NAME_BYTES": 200,
    "JSON_DEPTH": 128,
    "JSON_BYTES": 256 * 2**20,
    "JSON_CONTAINERS": 4_000_000,
    "MANIFEST_FILES": 100_000,
    "BLOCKS_PER_FILE": 1_000_000,
    "MAPPING_BYTES": 16 * 2**20,
    "MAPPING_STATEMENTS": 100_000,
    "MAPPING_WORK": 4_000_000,
}
# What a save writes unless told otherwise: these decide the bytes of a checkpoint.
DEFAULTS = {"PAGE_BYTES": 4096, "BLOCK_BYTES": 32 * 2**20, "MAX_SHARD_BYTES": 5 * 10**9, "WINDOWS_BYTES": 128 * 2**20}


@pytest.mark.parametrize(("name", "value"), (FORMAT | DEFAULTS).items())
def test_the_bounds_of_the_format_and_the_defaults_of_a_save(name, value):
    assert getattr(limits, name) == value


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 1),
        (5_000_000_000, 5 * GB),
        ("1", 1),
        ("7B", 7),
        ("5GB", 5 * GB),
        ("5gb", 5 * GB),
        (" 5 GB ", 5 * GB),
        ("200MB", 200_000_000),
        ("10KB", 10_000),
        ("3TB", 3000 * GB),
        ("1KiB", KIB),
        ("4.5GiB", 4608 * MIB),
        ("2tib", 2 * 1024 * 1024 * MIB),
        ("1.5KB", 1500),
        (2**60 - 2**10, 2**60 - 2**10),
    ],
)
def test_sizes_are_read_with_decimal_and_binary_units(size, expected):
    assert parse_bytes(size) == expected


@pytest.mark.parametrize(
    "size",
    [0, -1, True, False, None, 0.5, "", "GB", "0", "0.1", "-5GB", "five GB", "5PB", "5 G", "1e3q", "nan", "inf", 2**60],
)
def test_what_is_not_a_size_is_refused_with_the_value_named(size):
    with pytest.raises(ValueError, match="not a size: ") as caught:
        parse_bytes(size)
    assert repr(size) in str(caught.value)


def test_a_size_is_below_an_exbibyte() -> None:
    most = 2**60 - 1024  # the largest float below it
    assert parse_bytes(2**60 - 1) == 2**60 - 1
    assert parse_bytes(f"{most}B") == most
    for size in (2**60, f"{2**60}B", "1048576TiB"):
        with pytest.raises(InvalidArgument, match="not a size"):
            parse_bytes(size)
