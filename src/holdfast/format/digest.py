"""Digests: xxh3-128, written as 32 hexadecimal digits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

HEX_DIGITS = 32


def digest_hex(data: Buffer) -> str:
    """Return the digest of one buffer."""
    return xxhash.xxh3_128_hexdigest(data)


class Digest:
    """The incremental digest of several buffers."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        self._hash.update(data)

    def hex(self) -> str:
        return self._hash.hexdigest()
