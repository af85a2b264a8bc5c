"""Digests: xxh3-128, written as 32 hexadecimal digits."""

from __future__ import annotations

from xxhash import xxh3_128, xxh3_128_hexdigest

HEX_DIGITS = 32

Digest = xxh3_128  # of several buffers: update, hexdigest
digest_hex = xxh3_128_hexdigest  # of one buffer
