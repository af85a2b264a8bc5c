"""What a target of the fuzzer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """One parser. `unseal` finds the JSON inside an input, `seal` makes an input of changed JSON."""

    name: str
    seeds: tuple[bytes, ...]
    parse: Callable[[bytes], object]
    unseal: Callable[[bytes], bytes] = bytes
    seal: Callable[[bytes], bytes] = bytes
