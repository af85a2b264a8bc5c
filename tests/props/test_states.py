"""Random states: after a load everything is what was saved, or the load says what is not."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from tests.props.states import Derived, Spec, StateSpec, canonical, fill, leaf_spec, leaves_by_path

CHUNK = 500
CHUNKS = 19  # and a chunk through Checkpointers: 10,000 states
THROUGH_CHECKPOINTER = 500


@pytest.fixture
def path() -> Iterator[Path]:
    """A folder in memory: what is tried here is not the disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


def check_loaded(saved: dict[str, Any], live: dict[str, Any], seed: int) -> None:
    for name, value in saved.items():
        assert canonical(live[name]) == canonical(value), f"seed {seed}: {name} differs"
        if isinstance(live[name], Derived):
            bias = live[name].inner.bias.detach() * 2
            assert torch.equal(torch.nan_to_num(live[name].twice), torch.nan_to_num(bias)), f"seed {seed}: no hook"


def kept_objects(state: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The live tensors and arrays that a load must fill where they are."""
    trees = {name: value for name, value in state.items() if name.startswith("tree")}
    return [(path, leaf) for path, leaf in leaves_by_path(trees) if torch.is_tensor(leaf) or leaf.flags.writeable]


def check_identity(state: dict[str, Any], kept: list[tuple[Any, ...]], seed: int) -> None:
    found = dict(leaves_by_path({name: value for name, value in state.items() if name.startswith("tree")}))
    for path, leaf in kept:
        assert found[path] is leaf, f"seed {seed}: {path} is another object"


def misfit(spec: Spec, rng: random.Random) -> Spec:
    """A structure that differs in one of its tensors: gone, added, of another shape or dtype."""
    if spec.kind in ("tensor", "array"):
        other = Spec(spec.kind, "float64" if spec.dtype == "float32" else "float32", spec.shape)
        return rng.choice([Spec(spec.kind, spec.dtype, (*spec.shape, 7)), other, Spec("plain")])
    holders = [name for name, item in spec.items.items() if any(item.leaves())]
    if spec.kind in ("dict", "ordered") and (not holders or rng.random() < 0.3):
        return Spec(spec.kind, items={**spec.items, "added": leaf_spec(rng, "tensor")})
    if not holders:
        return leaf_spec(rng, "tensor")
    chosen = rng.choice(holders)
    return Spec(spec.kind, items={**spec.items, chosen: misfit(spec.items[chosen], rng)})


def check_fits(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    spec = StateSpec.drawn(rng)
    saved, live = spec.fill(rng, live=False), spec.fill(rng, live=True)
    before = canonical(dict(saved.items()))
    holdfast.save(path, saved)
    assert canonical(dict(saved.items())) == before, f"seed {seed}: the save changed the state"
    kept = kept_objects(live)
    report = holdfast.load(path, live)
    check_loaded(saved, live, seed)
    check_identity(live, kept, seed)
    assert not report.missing and not report.unexpected and not report.mismatched and not report.cast
    assert sum(text.startswith("tree") for text in report.loaded) == spec.tensors()


def check_misfit(path: Path, seed: int) -> None:
    """One tensor does not fit: a strict load raises and touches nothing, another one reports what differs."""
    rng = random.Random(seed)
    spec = StateSpec.drawn(rng)
    name = rng.choice(list(spec.trees))
    saved = spec.fill(rng, live=False)
    holdfast.save(path, saved)
    live = {**spec.fill(rng, live=True), name: fill(misfit(spec.trees[name], rng), rng, live=True)}
    before = {own: canonical(value) for own, value in live.items()}
    if not list(leaves_by_path(saved[name])) and not list(leaves_by_path(live[name])):
        return
    if not list(leaves_by_path(live[name])):
        return  # nothing is asked of the tree: it takes whatever was saved
    try:
        holdfast.load(path, live)
    except holdfast.Mismatch as error:
        assert name in str(error)
    else:
        raise AssertionError(f"seed {seed}: a misfit was not noticed")
    assert {own: canonical(value) for own, value in live.items()} == before, f"seed {seed}: something was touched"
    check_report(path, saved, live, name, seed)


def check_report(path: Path, saved: dict[str, Any], live: dict[str, Any], name: str, seed: int) -> None:
    report = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.api.warn", lambda text: None)
        try:
            report = holdfast.load(path, live, strict=False)
        except holdfast.Mismatch as error:
            assert "has nothing that fits" in str(error)
    if report is None:
        return
    told = {text.partition(": the ")[0] for text in (*report.missing, *report.unexpected, *report.mismatched)}
    mine, theirs = dict(leaves_by_path(live[name])), dict(leaves_by_path(saved[name]))
    for leaf_path in {*mine, *theirs}:
        label = f"{name}: {'.'.join(map(str, leaf_path)) or name}"
        equal = leaf_path in mine and leaf_path in theirs
        equal = equal and canonical(mine[leaf_path])[1:] == canonical(theirs[leaf_path])[1:]
        assert equal or label in told, f"seed {seed}: {label} differs, unreported"
    for own, value in saved.items():
        if own != name:
            assert canonical(live[own]) == canonical(value), f"seed {seed}: {own} differs"


def check_seed(path: Path, seed: int) -> None:
    (check_misfit if seed % 5 == 0 else check_fits)(path, seed)


def check_seeds(path: Path, seeds: range) -> None:
    for seed in seeds:
        check_seed(path / "x", seed)  # replaces what is there


def check_through_checkpointer(path: Path, seeds: range) -> None:
    with holdfast.Checkpointer(path, keep=holdfast.keep.last(1)) as checkpointer:
        for step, seed in enumerate(seeds, 1):
            rng = random.Random(seed)
            spec = StateSpec.drawn(rng)
            saved, live = spec.fill(rng, live=False), spec.fill(rng, live=True)
            expected = {name: canonical(value) for name, value in saved.items()}
            handle = checkpointer.save(step, saved)
            scramble(saved)
            handle.result(60)
            kept = kept_objects(live)
            assert checkpointer.restore(live) == step
            assert {name: canonical(live[name]) for name in saved} == expected, f"seed {seed} differs"
            check_identity(live, kept, seed)


def scramble(state: dict[str, Any]) -> None:
    """Training goes on: what was captured must not change with it."""
    for _, leaf in leaves_by_path({name: value for name, value in state.items() if name.startswith("tree")}):
        if isinstance(leaf, np.ndarray) and leaf.flags.writeable:
            leaf[...] = 0
        elif torch.is_tensor(leaf) and not leaf.is_conj():
            leaf.detach().zero_()


def test_a_slice_of_random_states(path: Path) -> None:
    check_seeds(path, range(100))


def test_a_slice_of_random_states_through_a_checkpointer(tmp_path: Path) -> None:
    check_through_checkpointer(tmp_path, range(10))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_states(path: Path, chunk: int) -> None:
    check_seeds(path, range(chunk * CHUNK, (chunk + 1) * CHUNK))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_random_states_through_checkpointers(tmp_path: Path) -> None:
    first = CHUNKS * CHUNK
    for begin in range(first, first + THROUGH_CHECKPOINTER, 100):
        check_through_checkpointer(tmp_path / str(begin), range(begin, begin + 100))
