"""Limits checked before anything is allocated or trusted, default sizes, and sizes parsed from "5GB" or "4GiB"."""

from __future__ import annotations

from holdfast.core.errors import InvalidArgument

KIB = 1024
MIB = 1024 * KIB
GB = 1000**3

HEADER_BYTES = 16 * MIB
HEADER_TENSORS = 200_000
TENSOR_RANK = 64
KEY_BYTES = 1 * KIB
FILE_NAME_BYTES = 200
JSON_DEPTH = 128
JSON_BYTES = 256 * MIB
JSON_CONTAINERS = 4_000_000
MANIFEST_FILES = 100_000
EXTRA_FILES = 1_000  # that a user publishes with one step
EXTRA_FILES_BYTES = 64 * MIB
PROGRAM_CONSTANTS_BYTES = 64 * MIB  # of tensors that a program has and no model
BLOCKS_PER_FILE = 1_000_000

MAPPING_BYTES = 16 * MIB
MAPPING_STATEMENTS = 100_000
MAPPING_WORK = 4_000_000  # names, terms and comparisons that the statements of a mapping may need

PAGE_BYTES = 4 * KIB
BLOCK_BYTES = 32 * MIB
MAX_SHARD_BYTES = 5 * GB

# Memory that a load may use in addition to the live tensors: the buffers of each rank, and the
# windows that all ranks of a host share.
LOAD_MEMORY_BYTES = 256 * 1000**2
LEAST_LOAD_MEMORY_BYTES = 32 * 1000**2
WINDOWS_BYTES = 128 * MIB

_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": GB, "TB": 1000 * GB}
_UNITS |= {"KIB": KIB, "MIB": MIB, "GIB": 1024 * MIB, "TIB": 1024 * 1024 * MIB}


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes from 5_000_000_000, "5GB" or "4.5GiB"; units are decimal, as in transformers."""
    if isinstance(size, int) and not isinstance(size, bool):
        if 1 <= size < 2**60:
            return size
        number, unit = 0.0, ""
    else:
        text = str(size).strip()
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
        unit = text[len(digits) :].strip().upper()
        try:
            number = float(digits)
        except ValueError:
            raise InvalidArgument(f"not a size: {size!r}; use a number of bytes, or a size such as '5GB'") from None
    if unit not in _UNITS or not 1 <= number * _UNITS[unit] < 2**60:
        raise InvalidArgument(f"not a size: {size!r}; use a number of bytes, or a size such as '5GB'")
    return int(number * _UNITS[unit])
