import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.digest import HEX_DIGITS, Digest, digest_hex


def test_the_digest_is_xxh3_128_in_hexadecimal():
    assert digest_hex(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest_hex(b"holdfast") == xxhash.xxh3_128(b"holdfast").hexdigest()
    assert len(digest_hex(b"holdfast")) == HEX_DIGITS


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_parts_digest_as_the_whole(parts):
    digest = Digest()
    for part in parts:
        digest.update(part)
    assert digest.hexdigest() == digest_hex(b"".join(parts))


@given(st.binary(min_size=1, max_size=200), st.data())
def test_one_flipped_bit_changes_the_digest(data, draw):
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert digest_hex(flipped) != digest_hex(data)


def test_any_buffer_is_digested_by_its_bytes():
    assert digest_hex(memoryview(bytearray(b"abc"))) == digest_hex(b"abc")
