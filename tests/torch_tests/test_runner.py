"""The runner of torch's tests, on small files of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.torch_tests.compare import compare, read_reasons
from tests.torch_tests.record import Outcome, Record
from tests.torch_tests.running import Settings, run_file

STANDS_IN = """
import unittest
ACCEPT = False
class TestCase(unittest.TestCase):
    pass
"""

ALL_ENDS = """
import os, time, unittest
class Ends(unittest.TestCase):
    def test_a_passes(self): pass
    def test_b_hangs(self): time.sleep(600)
    def test_c_dies(self): os._exit(3)
    def test_d_fails(self): self.fail("as it must")
    def test_e_skips(self): self.skipTest("as it must")
    @unittest.expectedFailure
    def test_f_fails_as_expected(self): self.fail("as it must")
    @unittest.expectedFailure
    def test_g_passes_unexpectedly(self): pass
class Poisoned(unittest.TestCase):
    poison_pill = False
    def setUp(self):
        if self.poison_pill: self.fail("an earlier test failed")
    def test_a_fails(self):
        type(self).poison_pill = True
        self.fail("as it must")
    def test_b_passes_in_another_process(self): pass
"""

OUTCOMES = {
    "Ends::test_a_passes": "passed",
    "Ends::test_b_hangs": "hang",
    "Ends::test_c_dies": "crash",
    "Ends::test_d_fails": "failed",
    "Ends::test_e_skips": "skipped",
    "Ends::test_f_fails_as_expected": "xfailed",
    "Ends::test_g_passes_unexpectedly": "xpassed",
    "Poisoned::test_a_fails": "failed",
    "Poisoned::test_b_passes_in_another_process": "passed",
}

RULES_IN_RANKS = """
import os, sys
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, MultiThreadedTestCase
from torch.testing._internal.common_utils import TestCase

def check(test):
    switch = sys.modules.get("holdfast.spmd.enable")
    test.assertTrue(switch is not None and switch.INSTALLED.is_on)

class Here(TestCase):
    def test_main(self): check(self)

class Processes(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_ranks(self):
        dist.init_process_group("gloo", rank=self.rank, world_size=2, store=dist.FileStore(self.file_name, 2))
        check(self)

class Threads(MultiThreadedTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_threads()
    def test_ranks(self): check(self)
"""


def _settings(tmp_path: Path, test: str, test_s: float = 60.0) -> Settings:
    source = tmp_path / "checkout" / "test" / "distributed"
    (source / "tensor").mkdir(parents=True)
    (source / "tensor" / "test_fake.py").write_text(test)
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "expecttest.py").write_text(STANDS_IN)
    return Settings(source, tmp_path / "out", packages, test_s, 120.0)


def _run(settings: Settings, rules: bool) -> Record:
    run_file(settings, "tensor/test_fake.py", rules, lambda record: True)
    return settings.record("tensor/test_fake.py", rules)


@pytest.mark.full
def test_every_end_of_a_test_is_named_and_the_rest_runs(tmp_path: Path) -> None:
    record = _run(_settings(tmp_path, ALL_ENDS, test_s=3.0), False)
    assert {name: outcome.outcome for name, outcome in record.outcomes().items()} == OUTCOMES
    assert record.has_ended()


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = _settings(tmp_path, ALL_ENDS, test_s=3.0)
    record = settings.record("tensor/test_fake.py", False)
    for name, outcome in OUTCOMES.items():
        if name != "Ends::test_d_fails":
            record.add(name, outcome, "before", 0.0)
    _run(settings, False)
    assert {name for name, outcome in record.outcomes().items() if outcome.why != "before"} == {"Ends::test_d_fails"}


def test_chosen_tests_only(tmp_path: Path) -> None:
    settings = replace(_settings(tmp_path, ALL_ENDS), only=("*::test_[df]_*", "Poisoned::*"))
    record = _run(settings, False)
    assert {name: outcome.outcome for name, outcome in record.outcomes().items()} == {
        name: outcome for name, outcome in OUTCOMES.items() if name[6:12] in ("test_d", "test_f") or "Poisoned" in name
    }
    assert not record.has_ended()


def test_a_run_that_is_stopped_leaves_no_process_behind(tmp_path: Path) -> None:
    settings = _settings(tmp_path, ALL_ENDS, test_s=60.0)
    record = settings.record("tensor/test_fake.py", False)
    run_file(settings, "tensor/test_fake.py", False, lambda record: record.begun() != "Ends::test_b_hangs")
    assert set(record.outcomes()) == {"Ends::test_a_passes"}
    assert not record.has_ended()
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(settings.source).encode() in line for line in lines)


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    record = _run(_settings(tmp_path, "import no_such_module"), False)
    assert record.has_ended()
    assert "no_such_module" in record.outcomes()["collection"].why


@pytest.mark.full
def test_the_rules_are_on_in_every_rank_of_a_run_with_them_and_in_none_without(tmp_path: Path) -> None:
    settings = _settings(tmp_path, RULES_IN_RANKS)
    names = {"Here::test_main", "Processes::test_ranks", "Threads::test_ranks"}
    for rules, outcome, word in ((True, "passed", "on"), (False, "failed", "off")):
        outcomes = _run(settings, rules).outcomes()
        assert {name: found.outcome for name, found in outcomes.items()} == dict.fromkeys(names, outcome), outcomes
        words = settings.ranks(rules).read_text().split()
        assert len(words) >= 2
        assert set(words) == {word}


def test_what_passes_without_the_rules_must_pass_with_them() -> None:
    def outcomes(**words: str) -> dict[str, Outcome]:
        return {name: Outcome(word, "", 0.0) for name, word in words.items()}

    without = outcomes(same="passed", worse="passed", hung="xfailed", better="xfailed", known="passed", gone="passed")
    with_rules = outcomes(same="passed", worse="skipped", hung="hang", better="xpassed", known="failed")
    found = compare("file.py", without, with_rules, {"file.py::kn*": "torch's own decision"})
    assert found.newly_failing == ["gone", "hung", "worse"]
    assert found.newly_passing == ["better"]
    assert found.listed == ["known"]
    assert (found.tests, found.passed_without, found.passed_with) == (6, 4, 2)


def test_every_listed_test_has_a_reason() -> None:
    for pattern, reason in read_reasons().items():
        assert pattern.count("::") == 2, pattern
        assert len(reason) > 20, pattern
