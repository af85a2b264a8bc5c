"""AOA programs of PaddleFormers and of Paddle's own tests, beside Paddle's own engine. `make interop`.

A program counts as
- same: both make the same targets, bit for bit;
- both refuse: most are PaddleFormers' own mistakes, such as a comma missing between two statements;
- only Holdfast: Paddle's engine refuses it; or it makes something else, and Holdfast brings the checkpoint back bit for
  bit: the forward program and then this one lead to what there was (Paddle drops ids on temporaries in silence);
- refused or different: none.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.errors import HoldfastError
from holdfast.mapping import Mapping
from tests.interop.aoa_cases import Case, cases_of, outputs_of, sized, sources_of
from tests.interop.aoa_engine import digest, dtype_of, source_array
from tests.interop.aoa_gather import Gathered, from_formers, from_tests
from tests.mapping.arrays import Array, made

HERE = Path(__file__).parent
PYTHON = os.environ.get("HOLDFAST_PADDLE_PYTHON", "")
CHECKOUT = os.environ.get("PADDLE_SRC", "")
DEADLINE_S = 300

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs paddlepaddle in an environment of its own: make interop")


def packages() -> Path:
    """The folder of the packages of Paddle's environment."""
    return next(Path(PYTHON).absolute().parent.parent.glob("lib/python*/site-packages"))


def paddles_results(cases: list[Case], folder: Path) -> list[dict[str, object]]:
    """What Paddle's engine makes of cases: digests of targets, or its error."""
    given, found = folder / "cases.json", folder / "results.json"
    given.write_text(json.dumps([asdict(case) for case in cases]))
    command = [os.path.abspath(PYTHON), str(HERE / "aoa_engine.py"), str(packages()), str(given), str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(found.read_text())


def own_result(case: Case) -> dict[str, object]:
    """What Holdfast makes of a case; targets that are known take their own dtype, as on a load."""
    targets = None if case.targets is None else sized(case.targets)
    try:
        compiled = Mapping.parse(case.config).compile(
            sized(case.sources), targets, source_tp=case.source_tp, target_tp=case.target_tp
        )
    except HoldfastError as error:
        return {"error": str(error)}
    arrays = {key: source_array(key, *spec) for key, spec in case.sources.items()}
    results: dict[str, Array] = {key: made(recipe, arrays)[0] for key, recipe in compiled.recipes.items()}
    if case.targets is not None:
        results = {key: array.astype(dtype_of(case.targets[key][1])) for key, array in results.items()}
    return {"targets": {key: digest(array) for key, array in results.items()}}


def comes_back(case: Case) -> bool:
    """Whether Holdfast makes the checkpoint again with this program of what the forward one made of it."""
    if case.forward is None:
        return False
    begun = sources_of(case.forward)
    arrays = {key: source_array(key, *spec) for key, spec in begun.items()}
    forward = Mapping.parse(case.forward).compile(sized(begun), source_tp=1, target_tp=1)
    there = {key: made(recipe, arrays)[0] for key, recipe in forward.recipes.items()}
    if not case.sources.keys() <= there.keys():
        return False
    targets = None if case.targets is None else sized(case.targets)
    back = Mapping.parse(case.config).compile(sized(case.sources), targets, source_tp=1, target_tp=1)
    return all(
        np.array_equal(made(recipe, there)[0].astype(arrays[key].dtype).view(np.uint16), arrays[key].view(np.uint16))
        for key, recipe in back.recipes.items()
        if key in arrays
    )


def kinds(cases: list[Case], folder: Path) -> Iterator[tuple[Case, str, str]]:
    for case, paddle in zip(cases, paddles_results(cases, folder), strict=True):
        own = own_result(case)
        if "error" in own:
            yield case, "both refuse" if "error" in paddle else "REFUSED", str(own["error"])
        elif own == paddle:
            yield case, "same", ""
        elif "error" in paddle:
            yield case, "only Holdfast", str(paddle["error"])[:150]
        else:
            yield case, "only Holdfast" if comes_back(case) else "DIFFERENT", ""


def told(programs: list[Gathered], left_out: list[str], folder: Path) -> Counter[str]:
    """Run programs, and print what came of them."""
    cases = list(cases_of(programs))
    counts: Counter[str] = Counter()
    print()
    for case, kind, why in kinds(cases, folder):
        counts[kind] += 1
        if kind != "same":
            print(f"  {kind}: {case.name}{f': {why.splitlines()[0][-160:]}' if why else ''}")
    for line in left_out:
        print(f"  left out: {line}")
    print(f"  {len(programs)} programs in {len(cases)} cases: {dict(counts)}")
    return counts


def test_programs_of_paddleformers(tmp_path: Path) -> None:
    programs, left_out = from_formers(packages())
    counts = told(programs, left_out, tmp_path)
    assert not left_out and len(programs) >= 150
    assert not counts["REFUSED"] and not counts["DIFFERENT"]
    assert counts["same"] >= 100


@pytest.mark.skipif(not CHECKOUT, reason="needs a checkout of Paddle, whose tests no package has: PADDLE_SRC=folder")
def test_programs_of_paddles_own_tests(tmp_path: Path) -> None:
    programs, left_out = from_tests(Path(CHECKOUT))
    counts = told(programs, left_out, tmp_path)
    assert programs
    assert not counts["REFUSED"] and not counts["DIFFERENT"]


def test_the_sources_that_programs_get_fit_them() -> None:
    """No program is left without a result because of the shapes that it was given here."""
    programs, _ = from_formers(packages())
    empty = [p.name for p in programs if p.direction == "forward" and not outputs_of(p.config, sources_of(p.config))]
    assert len(empty) <= 8, empty  # those that both engines refuse
