"""The corpus has at least as many attacks of each kind as were promised, and no two are one."""

from __future__ import annotations

import pytest

from tests.attacks import bombs, files, headers, names, pickles, versions
from tests.attacks.attack import Attack

AT_LEAST = {
    "headers": (headers.ATTACKS, 60),
    "names in keys": (names.IN_KEYS, 40),
    "names of files": (names.IN_FILES, 40),
    "names in weight maps": (names.IN_WEIGHT_MAP, 40),
    "links, pipes and devices": (files.ATTACKS, 24),
    "bombs": (bombs.ATTACKS, 20),
    "pickles": (pickles.ATTACKS, 5),
    "versions": (versions.ATTACKS, 20),
}


@pytest.mark.parametrize("kind", AT_LEAST)
def test_the_corpus_is_as_large_as_promised(kind: str) -> None:
    attacks, count = AT_LEAST[kind]
    assert len({attack.name for attack in attacks}) == len(attacks) >= count


def test_most_attacks_are_to_be_refused_not_read() -> None:
    every: list[Attack] = [attack for attacks, _ in AT_LEAST.values() for attack in attacks]
    harmless = [attack for attack in every if attack.harmless]
    assert {attack.name for attack in harmless} <= {attack.name for attack in (*names.IN_KEYS, *versions.ATTACKS)}
    assert len(harmless) < len(every) // 10


def test_every_kind_of_name_is_in_the_corpus() -> None:
    """Those that faults.md lists, each in keys and in file names."""
    for listed in (names.NAMES, (*names.BAD_KEYS, *names.PATH_KEYS)):
        assert {"", ".."} <= set(listed)
        assert any(name.startswith("/") for name in listed)
        assert any("\0" in name for name in listed) and any("\n" in name for name in listed)
        assert any(len(name) == 300 for name in listed)
        assert any("%2e" in name for name in listed) and any("\\" in name for name in listed)
        assert "con" in listed
