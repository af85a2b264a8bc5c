"""Ranks agree or fail together, and a host is told by its boot and its shared memory."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.core.errors import Damaged, InvalidArgument, NotFound, PeerFailed, error_record
from holdfast.core.ranks import HOST_VARIABLE, SingleProcess, host_identity, raise_on_all_ranks, run_on_all_ranks


@dataclass
class Scripted:
    """Rank `rank` of a run whose other ranks have already answered."""

    others: dict[int, object]
    rank: int = 0
    told: list[object] = field(default_factory=list)
    world: int = 0

    def __post_init__(self):
        self.world = len(self.others) + 1

    def gather(self, value):
        self.told.append(json.loads(json.dumps(value)))
        return [value if rank == self.rank else self.others[rank] for rank in range(self.world)]

    def all_max(self, values):
        raise AssertionError("only answers are gathered")

    def host(self):
        return "here"


def good(value):
    caller = sys._getframe(1).f_code.co_qualname
    return {"value": value, "at": caller}


def bad(error):
    return {"error": error_record(error)}


def fail(error):
    raise error


def test_alone_is_a_run_of_one_rank():
    assert run_on_all_ranks(SingleProcess(), lambda: "mine") == ["mine"]
    assert (SingleProcess().rank, SingleProcess().world) == (0, 1)


def test_every_rank_gets_all_values_in_rank_order():
    assert run_on_all_ranks(Scripted({0: good("a"), 2: good("c")}, rank=1), lambda: "b") == ["a", "b", "c"]


def test_an_error_alone_is_raised_as_it_is():
    cause = Damaged("the digest differs")
    with pytest.raises(Damaged, match=r"^the digest differs$") as caught:
        run_on_all_ranks(SingleProcess(), lambda: fail(cause))
    assert caught.value is cause


def test_another_ranks_error_is_raised_here_and_names_that_rank():
    ranks = Scripted({1: good(None), 2: bad(NotFound("no such file")), 3: good(None)})
    with pytest.raises(NotFound, match=r"^rank 2: no such file$"):
        run_on_all_ranks(ranks, lambda: None)


def test_ranks_that_failed_alike_are_named_together():
    same = bad(Damaged("short file"))
    with pytest.raises(Damaged, match=r"^ranks 1, 3: short file$"):
        run_on_all_ranks(Scripted({1: same, 2: good(None), 3: same}), lambda: None)


def test_of_different_errors_the_lowest_ranks_is_raised_everywhere():
    ranks = Scripted({0: bad(NotFound("gone")), 1: bad(Damaged("torn"))}, rank=2)
    with pytest.raises(NotFound, match=r"^rank 0: gone$"):
        run_on_all_ranks(ranks, lambda: fail(Damaged("torn")))


def test_an_error_on_all_ranks_alike_names_none():
    with pytest.raises(Damaged, match=r"^torn$"):
        run_on_all_ranks(Scripted({1: bad(Damaged("torn"))}), lambda: fail(Damaged("torn")))


def test_a_rank_that_fails_still_tells_the_others():
    ranks = Scripted({1: good(None)})
    with pytest.raises(PeerFailed, match=r"^rank 0: ZeroDivisionError: oops$") as caught:
        run_on_all_ranks(ranks, lambda: fail(ZeroDivisionError("oops")))
    assert ranks.told == [{"error": ["PeerFailed", "ZeroDivisionError: oops"]}]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_interrupt_is_not_kept_for_a_gather():
    ranks = Scripted({1: good(None)})
    with pytest.raises(KeyboardInterrupt):
        run_on_all_ranks(ranks, lambda: fail(KeyboardInterrupt()))
    assert ranks.told == []


def test_the_variable_is_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "north")
    assert host_identity() == "north"
    monkeypatch.setenv(HOST_VARIABLE, "")
    assert host_identity() not in ("", "north")


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="needs the boot id of Linux")
def test_the_identity_names_the_boot_and_the_shared_memory() -> None:
    boot, _, memory = host_identity().partition("/")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert memory == str(os.stat("/dev/shm").st_dev)


def test_without_shared_memory_every_process_is_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: False)
    monkeypatch.setattr("socket.gethostname", lambda: "south")
    assert host_identity() == f"south/{os.getpid()}"


def test_a_single_process_names_no_host() -> None:
    assert SingleProcess().host() == "alone"


def test_ranks_at_different_points_are_told_so():
    for other in ({"value": 1, "at": "_collect"}, [1, False], 7):
        with pytest.raises(InvalidArgument, match="the ranks are at different points"):
            run_on_all_ranks(Scripted({1: other}), lambda: "mine")


def test_the_arguments_of_one_rank_fail_the_others_where_they_gather_next():
    ranks = Scripted({0: good("a")}, rank=1)
    with pytest.raises(NotFound, match="rank 1: mine"):
        raise_on_all_ranks(ranks, lambda: fail(NotFound("mine")))
    assert ranks.told == [bad(NotFound("mine"))]
    with pytest.raises(NotFound, match="rank 1: mine"):
        run_on_all_ranks(Scripted({1: bad(NotFound("mine"))}), lambda: "another rank")
    quiet = Scripted({0: good("a")}, rank=1)
    assert raise_on_all_ranks(quiet, lambda: "right") == "right" and not quiet.told
