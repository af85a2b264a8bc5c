"""Several hosts: blocks are cut where hosts meet, little travels, and the bytes stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from tests.dist.harness import run_ranks
from tests.dist.layouts import LAYOUTS
from tests.dist.test_layouts import CUT, _load_all, _tensor_bytes

pytestmark = pytest.mark.sliced(16)

HOSTS = {"two": ["a", "a", "b", "b"], "four": ["a", "b", "c", "d"], "mixed": ["a", "b", "a", "b"]}


def _save(layout: str, path: str) -> int:
    held = LAYOUTS[layout][1]("truth", True)
    checkpoint = holdfast.save(path, held.state, step=7, ties=held.ties, **CUT)
    return int(checkpoint.manifest.writer["hosts"])


@pytest.mark.full
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("layout", ["fsdp-4", "tp-4", "fsdp-tp-2x2"])
def test_bytes_do_not_depend_on_hosts(tmp_path: Path, layout: str, hosts: str) -> None:
    run_ranks(1, _save, "single", str(tmp_path / "single"))
    found = run_ranks(4, _save, layout, str(tmp_path / "several"), hosts=HOSTS[hosts])
    assert found == [len(set(HOSTS[hosts]))] * 4
    assert _tensor_bytes(tmp_path / "several") == _tensor_bytes(tmp_path / "single")
    assert holdfast.open(tmp_path / "several").verify().good
    names = sorted(path.name for path in (tmp_path / "several").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "single").iterdir()), "what travelled was left behind"
    run_ranks(4, _load_all, layout, True, str(tmp_path), ["single", "several"], hosts=HOSTS[hosts])
