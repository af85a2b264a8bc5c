"""`python -m tests.spmd`: the matrix with and without holdfast.spmd, as a table."""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TextIO

from tests.spmd.cases import PARTIALS, WAYS, Case, cases_of
from tests.spmd.compare import failures, grown, spoilt, unexplained, why_grown
from tests.spmd.ops import all_operations
from tests.spmd.team import Finding, Team

OUTCOMES = ("right", "talk", "raise", "wrong", "hang")
NOTE = """talk: right, but a rank receives more bytes, forward and backward, than tests/spmd/budget.py allows;
counted as rings send them: (ranks - 1) / ranks of a tensor to scatter or gather it, twice that to reduce it"""


def main() -> int:
    arguments = _arguments()
    if arguments.way == "thread" and arguments.ranks == "threads":
        sys.exit("--way thread needs --ranks processes: ranks that are threads have no group in a second thread")
    operations = all_operations()
    if unknown := [only for only in arguments.only if not fnmatch.filter(operations, only)]:
        sys.exit(f"no operation is called {', '.join(unknown)}: see tests/spmd/ops")
    chosen = [name for name in operations if any(fnmatch.fnmatchcase(name, only) for only in arguments.only)]
    if arguments.family:
        chosen = [name for name in chosen if operations[name].family in arguments.family]
    cases = [case for name in chosen for case in cases_of(operations[name]) if case.others in arguments.others]
    cases = [
        replace(case, laid=arguments.laid, way=arguments.way, partial=arguments.partial, shards=arguments.shards)
        for case in cases[arguments.offset :: arguments.every]
    ]
    families = {name: operation.family for name, operation in operations.items()}
    found: dict[bool, list[Finding]] = {}
    for enable in {"both": (False, True), "on": (True,), "off": (False,)}[arguments.mode]:
        found[enable] = _run(cases, enable, arguments)
        _print_table(found[enable], families, "with holdfast.spmd" if enable else "torch alone")
    return _conclude(found)


def _conclude(found: dict[bool, list[Finding]]) -> int:
    """What the two tables say together; 1 if it is more than may be."""
    problems = failures(found.get(True, []))
    if len(found) == 2:
        alone, ours = found[False], found[True]
        worse, more = spoilt(alone, ours), grown(alone, ours)
        print(
            f"\nof {sum(finding.is_right for finding in alone)} cases that torch alone has right, {len(worse)} are not "
            f"right with the rules, and {len(more)} move more bytes, "
            f"{sum(why_grown(*pair) is None for pair in more)} of them without a reason"
        )
        problems += [f"right with torch alone: {own}" for _, own in worse]
        for theirs, own in more:
            why = why_grown(theirs, own) or "no reason"
            print(f"{own.bytes} bytes, {theirs.bytes} with torch alone: {own.case}: {why}")
        problems += unexplained(alone, ours)
    for problem in problems:
        print(f"not allowed: {problem}")
    return 1 if problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.spmd")
    parser.add_argument("--only", nargs="*", default=["*"], help="operations, as patterns")
    parser.add_argument("--family", nargs="*", default=[])
    parser.add_argument("--others", nargs="*", default=["follow", "whole", "apart"], help="how the other inputs lie")
    parser.add_argument("--laid", choices=("rows", "columns"), default="rows", help="how inputs lie in memory")
    parser.add_argument("--way", choices=WAYS, default="eager", help="; ".join(map(": ".join, WAYS.items())))
    parser.add_argument("--partial", choices=PARTIALS, default="sum", help="how a Partial's parts make the tensor")
    parser.add_argument(
        "--shards", choices=("plain", "strided"), default="plain", help="strided: as FSDP2 with TP shards (torch 2.13)"
    )
    parser.add_argument("--every", type=int, default=1, help="only every so-manieth case")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--mode", choices=("both", "on", "off"), default="both")
    parser.add_argument("--ranks", choices=("processes", "threads"), default="processes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a folder for the findings, one JSON line each")
    parser.add_argument("--show", action="store_true", help="print each finding that is not right")
    return parser.parse_args()


def _run(cases: list[Case], enable: bool, arguments: argparse.Namespace) -> list[Finding]:
    findings: list[Finding] = []
    began = time.monotonic()
    threads = arguments.ranks == "threads"
    random = {name for name, operation in all_operations().items() if operation.random}
    common = [case for case in cases if not threads or case.operation not in random]
    apart = [case for case in cases if threads and case.operation in random]  # threads share one generator
    with (
        Team(enable, threads, arguments.device) as team,
        Team(enable, device=arguments.device) as processes,
        _open(arguments.out, enable) as file,
    ):
        for finding in chain(_asked_again(team.find(common), processes), processes.find(apart)):
            findings.append(finding)
            words = [str(finding.case), finding.case.operation, finding.outcome, finding.detail, finding.bytes]
            file.write(json.dumps(words) + "\n")
            if arguments.show and finding.outcome != "right":
                print(f"{finding.outcome:5} {finding.case} {finding.detail}", flush=True)
            if len(findings) % 1000 == 0:
                taken_s = time.monotonic() - began
                print(f"  {len(findings)} of {len(cases)}, {taken_s:.0f} s", file=sys.stderr, flush=True)
    return findings


def _asked_again(findings: Iterable[Finding], processes: Team) -> Iterator[Finding]:
    """Threads share what torch keeps of a mesh, and may hang where real ranks do not: those have the last word."""
    for finding in findings:
        yield from processes.find([finding.case]) if finding.outcome == "hang" else [finding]


def _open(folder: Path | None, enable: bool) -> TextIO:
    if folder is None:
        return io.StringIO()
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{'on' if enable else 'off'}.jsonl").open("w", buffering=1)


def _print_table(findings: list[Finding], families: dict[str, str], title: str) -> None:
    counts: dict[str, Counter[str]] = {}
    for finding in findings:
        for row in (families[finding.case.operation], "all"):
            counts.setdefault(row, Counter())[finding.outcome] += 1
    print(f"\n{title}: {len(findings)} cases of {len({finding.case.operation for finding in findings})} operations")
    print(f"{'family':12}" + "".join(f"{name:>9}" for name in ("cases", *OUTCOMES)))
    for row in sorted(counts, key=lambda row: (row == "all", row)):
        numbers = (counts[row].total(), *(counts[row][outcome] for outcome in OUTCOMES))
        print(f"{row:12}" + "".join(f"{number:>9}" for number in numbers))
    print(NOTE)


if __name__ == "__main__":
    sys.exit(main())
