"""Bombs are refused by limits, in little time and memory, before anything is allocated.

Time is that of the processor; memory is the peak that tracemalloc sees, numpy's included.
"""

import json
import tracemalloc

import pytest

from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError
from tests.attacks.attack import lay_out, problem_of
from tests.attacks.bombs import ATTACKS
from tests.attacks.forge import examine

MEMORY_BYTES = 128 * limits.MIB


@pytest.mark.sliced(2)
@pytest.mark.parametrize("bomb", ATTACKS, ids=lambda attack: attack.name)
def test_a_bomb_is_refused_in_little_time_and_memory(original, tmp_path, bomb):
    folder = lay_out(bomb, original, tmp_path)
    assert problem_of(bomb, folder) == ""
    tracemalloc.start()
    try:
        with pytest.raises(HoldfastError):
            examine(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES


def test_a_manifest_whose_digest_was_not_forged_is_refused(checkpoint):
    fields = json.loads((checkpoint / "holdfast.json").read_bytes())
    fields["step"] = 5
    (checkpoint / "holdfast.json").write_text(json.dumps(fields, separators=(",", ":")) + "\n")
    with pytest.raises(Damaged, match="the digest of the manifest is"):
        examine(checkpoint)
