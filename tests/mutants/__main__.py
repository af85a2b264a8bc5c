"""Mutate packages and run the tests that reach each change: `python -m tests.mutants plan core --count 300 --seed 0`.

Each mutant is a copy of src with one change, under out/mutants. The tests of the mirror folder that reach the changed
lines run first, then those of other folders. A test that fails, or a run past its deadline, kills the mutant. Results
are kept by package and source: a run that was stopped goes on, and `--again` tries the survivors once more. The exit
code is 1 where a survivor has no reason in tests/mutants/explained.toml.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from tests.mutants.mutations import Mutation, mutations
from tests.mutants.reach import Reach, digest, recorded
from tests.mutants.record import KILLED, SURVIVED, TIMEOUT, UNREACHED, Record, Result, explanation
from tests.mutants.scratch import OUT, REPOSITORY, Scratch

STARTUP_S = 45.0


def main() -> int:
    """Run the mutants of each package and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", help="folders of src/holdfast, such as plan or mapping/compile")
    parser.add_argument("--count", type=int, default=300, help="how many mutants of each package, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--wider", nargs="*", default=[], help="test folders beside the mirror (default: all of unit tests)"
    )
    parser.add_argument("--again", action="store_true", help="try the survivors of an earlier run once more")
    arguments = parser.parse_args()
    unexplained = [run(package, arguments) for package in arguments.packages]
    return 1 if sum(unexplained) else 0


def run(package: str, arguments: argparse.Namespace) -> int:
    """Run the sample of one package; return how many survivors nobody explained."""
    folder = REPOSITORY / "src" / "holdfast" / package
    sources = {
        path.relative_to(REPOSITORY / "src" / "holdfast").as_posix(): path for path in sorted(folder.rglob("*.py"))
    }
    texts = {file: path.read_bytes() for file, path in sources.items()}
    found = [mutation for file, source in texts.items() for mutation in mutations(file, source)]
    chosen = random.Random(arguments.seed).sample(found, min(arguments.count, len(found)))
    reach = recorded(package, arguments.wider)
    record = Record(OUT / f"{package.replace('/', '.')}-{digest([folder])}.jsonl")
    waiting = [
        mutation
        for mutation in chosen
        if mutation not in record.results or (arguments.again and record.results[mutation].alive)
    ]
    print(f"{package}: {len(chosen)} of {len(found)} mutants, {len(waiting)} to run", flush=True)
    scratches: SimpleQueue[Scratch] = SimpleQueue()
    for number in range(arguments.jobs):
        scratches.put(Scratch(str(number)))

    def attempt(mutation: Mutation) -> Result:
        scratch = scratches.get()
        try:
            return try_mutant(scratch, mutation, texts[mutation.file], reach)
        finally:
            scratches.put(scratch)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for number, result in enumerate(pool.map(attempt, waiting), 1):
            record.add(result)
            where = f"{result.mutation.file}:{result.mutation.line}"
            print(f"  {number}/{len(waiting)} {result.outcome} {where} ({result.seconds:.0f} s)", flush=True)
    return report(package, [record.results[mutation] for mutation in chosen], texts)


def try_mutant(scratch: Scratch, mutation: Mutation, source: bytes, reach: Reach) -> Result:
    """Run the tests that reach a mutant: the mirror folder first, then the others."""
    started = time.monotonic()
    last = mutation.line + mutation.before.count("\n")
    tests = reach.of(mutation.file, mutation.line, last)
    mirrored = set(reach.mirror)
    outcome = SURVIVED if tests else UNREACHED
    scratch.write(mutation.file, mutation.apply(source))
    try:
        for stage in ([test for test in tests if test in mirrored], [test for test in tests if test not in mirrored]):
            if stage and outcome == SURVIVED:
                deadline_s = STARTUP_S + 5 * sum(reach.seconds[test] for test in stage)
                code, _ = scratch.run_tests(stage, deadline_s)
                outcome = {0: SURVIVED, None: TIMEOUT}.get(code, KILLED)
    finally:
        scratch.write(mutation.file, source)
    return Result(mutation, outcome, round(time.monotonic() - started, 1), len(tests))


def report(package: str, results: list[Result], texts: dict[str, bytes]) -> int:
    """Print the survivors with their diffs, and the score."""
    unexplained = 0
    for result in results:
        if result.alive:
            reason = explanation(result.mutation)
            unexplained += not reason
            print(f"\n{result.outcome}: {reason or 'no reason given'} ({result.tests} tests reach it)")
            print(result.mutation.diff(texts[result.mutation.file]))
    dead = sum(not result.alive for result in results)
    explained = len(results) - dead - unexplained
    score = 100 * dead / len(results) if results else 100.0
    print(
        f"\n{package}: {dead} of {len(results)} killed ({score:.0f}%), {explained} explained, {unexplained} not",
        flush=True,
    )
    return unexplained


if __name__ == "__main__":
    sys.exit(main())
