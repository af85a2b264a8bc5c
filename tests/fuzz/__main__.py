"""The fuzzer: `python -m tests.fuzz [--minutes 10] [--seed N] [--only TARGET] [--replay FILE]`.

Mutates headers, indexes, manifests, states, cards, tags and notes, and their JSON trees, pickles and
foreign checkpoints, and gives them to the parsers. A crash, a hang or 200 MiB of memory is a finding: it is made small
and saved under out/fuzz. Exit 1 if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.fuzz.runner import Batch, Finding, fuzz, judge_in_child, minimized
from tests.fuzz.targets import TARGETS, Target

_BATCH_S = 2.0
_CORPUS = 500
_OUT = Path("out/fuzz")


def run(targets: Mapping[str, Target], seconds: float, seed: int, out: Path = _OUT, *, quiet: bool = False) -> Batch:
    """Fuzz for so long; the findings, each of a kind once, are saved and returned."""
    corpus = {name: list(target.seeds) for name, target in targets.items()}
    total, known = Batch(), set[tuple[str, str, str]]()
    started = time.monotonic()
    number = 0
    while time.monotonic() < started + seconds:
        left = started + seconds - time.monotonic()
        batch = fuzz(targets, corpus, f"{seed}:{number}", min(_BATCH_S, left))
        number += 1
        total.executions += batch.executions
        total.grown_bytes = max(total.grown_bytes, batch.grown_bytes)
        for name, data in batch.fresh:
            if len(corpus[name]) < _CORPUS:
                corpus[name].append(data)
        for found in batch.findings:
            if (found.target, found.kind, found.what) not in known:
                known.add((found.target, found.kind, found.what))
                total.findings.append(_save(minimized(targets[found.target], found), seed, out))
        if not quiet:
            _tell(total, sum(map(len, corpus.values())), time.monotonic() - started)
    total.fresh = [(name, data) for name in corpus for data in corpus[name]]
    return total


def _tell(total: Batch, kept: int, seconds: float) -> None:
    print(
        f"\r{seconds:6.0f} s  {total.executions:>9} executions  {total.executions / seconds:7.0f}/s  {kept:5} kept  "
        f"{total.grown_bytes >> 20} MiB  {len(total.findings)} findings",
        end="",
        file=sys.stderr,
        flush=True,
    )


def _save(found: Finding, seed: int, out: Path) -> Finding:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{found.target}-{found.kind}-{hashlib.sha256(found.data).hexdigest()[:12]}"
    path.write_bytes(found.data)
    print(
        f"\n{found.kind} of {found.target}: {found.what}\n  seed {seed}; again: python -m tests.fuzz --replay {path}",
        file=sys.stderr,
    )
    return found


def replay(path: Path) -> int:
    """Parse one saved input again; the exit code."""
    found = judge_in_child(TARGETS[path.name.partition("-")[0]], path.read_bytes())
    print(f"{path}: {found.kind}: {found.what}" if found else f"{path}: refused or read, as it should be")
    return 1 if found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fuzzer; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="does the same again")
    parser.add_argument("--only", choices=[*TARGETS], default=None)
    parser.add_argument("--replay", type=Path, default=None, help="a saved finding")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        return replay(options.replay)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    targets = TARGETS if options.only is None else {options.only: TARGETS[options.only]}
    print(f"fuzzing {', '.join(targets)} for {options.minutes:g} minutes with seed {seed}", file=sys.stderr)
    total = run(targets, options.minutes * 60, seed)
    print(
        f"\n{total.executions} executions, {len(total.fresh)} inputs kept, memory grew by at most "
        f"{total.grown_bytes >> 20} MiB, {len(total.findings)} findings; seed {seed}"
    )
    return 1 if total.findings else 0


if __name__ == "__main__":
    sys.exit(main())
