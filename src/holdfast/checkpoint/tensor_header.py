"""Headers of tensor files: read from an open file and checked against the manifest."""

from __future__ import annotations

from holdfast.core.errors import Damaged
from holdfast.format.digest import digest_hex
from holdfast.format.manifest import FileRecord
from holdfast.format.safetensors import LENGTH_BYTES, header_bytes
from holdfast.storage.base import Reader


def read_header(file: Reader, record: FileRecord, where: str) -> bytes:
    """Return the header of a tensor file, with its length, and close the file; raises Damaged."""
    try:
        prefix = bytearray(min(LENGTH_BYTES, file.size))
        file.read_into(0, [memoryview(prefix)])
        data = bytearray(header_bytes(bytes(prefix), file.size, where))
        file.read_into(0, [memoryview(data)])
    finally:
        file.close()
    if record.header is not None and digest_hex(data) != record.header.digest:
        raise Damaged(f"{where}: the digest of the header is {digest_hex(data)}, expected {record.header.digest}")
    return bytes(data)
