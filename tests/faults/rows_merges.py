"""Merges that are killed or whose disk fails at every call of the storage, and merges of models that do not fit."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch

import holdfast
from holdfast.convert.destination import DestinationFolder
from holdfast.testing.faults import Fault, FaultGate, faulty
from holdfast.testing.watched import WatchedStorage
from tests.faults.cases import Case, NotInjected, Wrong, run_cases
from tests.faults.row import Row, Tally
from tests.faults.world import in_child

KILLED = "a merge is killed at each call of the storage"
FILLED = "the disk of a merge is full from each call of the storage on, or once"
REFUSED = "models that do not fit, that are damaged, or that speak other tokens"
BLOCK_BYTES = 4096


class Models:
    """Three small models in a folder, the target of a merge, and what is expected there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = folder / "out"
        self.paths = [self.write(f"m{number}", seed=number) for number in range(3)]
        holdfast.merge(self.paths[:2], folder / "expected", weights=[1, 3], max_shard_size=6000)
        self.expected = snapshot(folder / "expected")
        self.before: Mapping[str, bytes] = {}

    def write(self, name: str, *, seed: int = 0, tokens: Mapping[str, int] | None = None, **changes: Any) -> Path:
        """Write a model with changed tensors; those that are None are left out."""
        generator = torch.Generator().manual_seed(seed)
        plain = {f"layers.{n}.w": torch.randn(40, 30, generator=generator).bfloat16() for n in range(4)}
        tensors = {key.replace("_", "."): value for key, value in changes.items()}
        kept = {key: value for key, value in {**plain, **tensors}.items() if value is not None}
        path = self.folder / name
        path.mkdir()
        safetensors.torch.save_file(kept, path / "model.safetensors")
        (path / "config.json").write_text("{}")
        if tokens is not None:
            (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
        return path

    def occupy(self) -> None:
        """Put another model in the target, which the merge is to replace."""
        holdfast.merge(self.paths[1:], self.target, weights=[1, 1])
        self.before = snapshot(self.target)

    def merge(self, models: list[Path] | None = None, **options: Any) -> None:
        chosen = {"weights": [1, 3], "max_shard_size": 6000, "force": True, **options}
        holdfast.merge(models or self.paths[:2], self.target, **chosen)

    def judge(self, *, done: bool | None) -> None:
        """Raise Wrong unless the target is as it was before, or, unless `done` is False, complete."""
        found = snapshot(self.target)
        if not (found == self.before and not done) and not (found == self.expected and done is not False):
            raise Wrong(f"the target has {sorted(found)}, before {sorted(self.before)}")

    def judge_next(self) -> None:
        """Raise Wrong unless the next merge succeeds."""
        self.merge()
        self.judge(done=True)


def snapshot(folder: Path) -> dict[str, bytes]:
    """The files of a folder; none if it is not there."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@contextmanager
def models(*, occupied: bool = False) -> Iterator[Models]:
    with tempfile.TemporaryDirectory(prefix="holdfast-merges-") as folder:
        with mock.patch("holdfast.merging.merge.BLOCK_BYTES", BLOCK_BYTES):
            made = Models(Path(folder))
            if occupied:
                made.occupy()
            yield made


@contextmanager
def faulty_target(fault: Fault) -> Iterator[list[WatchedStorage]]:
    """Wrap the storage of the target with a fault; yields the storages that were opened."""
    opened: list[WatchedStorage] = []
    real = DestinationFolder.at

    def at(path: Any) -> DestinationFolder:
        target = real(path)
        opened.append(faulty(target.storage, fault, quiet=True))
        return DestinationFolder(target.raw_path, opened[-1], target.folder)  # type: ignore[arg-type]

    with mock.patch.object(DestinationFolder, "at", staticmethod(at)):
        yield opened


def killed_at(number: int, *, occupied: bool) -> None:
    """Kill a merge at a call of the storage."""
    with models(occupied=occupied) as made:

        def work() -> None:
            torch.set_num_threads(1)
            with faulty_target(Fault("kill", number)):
                made.merge()

        _, end = in_child(work)
        if end != signal.SIGKILL:
            raise NotInjected
        made.judge(done=None)
        made.judge_next()


def full_at(number: int, *, occupied: bool, lasting: bool) -> None:
    """Let a call of the storage fail for want of space."""
    with models(occupied=occupied) as made:
        done = True
        with faulty_target(Fault("enospc", number, lasting=lasting)) as opened:
            try:
                made.merge()
            except holdfast.StorageError as error:
                done = False
                if "No space left" not in str(error):
                    raise Wrong(f"the error is not clear: {error!r}") from error
        gate = opened[0].gate
        assert isinstance(gate, FaultGate)
        if not gate.done:
            raise NotInjected
        made.judge(done=None if done else False)
        made.judge_next()


def _every_call(case: Callable[[int], None]) -> Iterator[Case]:
    """Yield a case for the first call, the second, and so on, until there are no more."""
    over: list[int] = []

    def once(number: int) -> None:
        try:
            case(number)
        except NotInjected:
            over.append(number)
            raise

    for number in range(1, 1000):
        if len(over) > 2:
            return
        yield f"call {number}", partial(once, number)


def killed(seed: int) -> Tally:
    tallies = [
        run_cases(KILLED, seed, _every_call(partial(killed_at, occupied=occupied))) for occupied in (False, True)
    ]
    return tallies[0] + tallies[1]


def full(seed: int) -> Tally:
    total = Tally()
    for occupied in (False, True):
        for lasting in (False, True):
            case = partial(full_at, occupied=occupied, lasting=lasting)
            total += run_cases(FILLED, seed, _every_call(case))
    return total


def _truncated(path: Path, size: int) -> Path:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    return path


def _damaged_step(made: Models) -> Path:
    step = made.folder / "step-000000000001"
    holdfast.save(step, {"model": safetensors.torch.load_file(made.paths[0] / "model.safetensors")}, step=1)
    file = next(step.glob("model*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)
    return step


Build = Callable[[Models], Path]
UNFIT: dict[str, tuple[Build, str]] = {
    "a missing tensor": (lambda made: made.write("bad", layers_1_w=None), "has no 'layers.1.w'"),
    "another shape": (lambda made: made.write("bad", layers_1_w=torch.ones(40, 31).bfloat16()), "has the shape"),
    "one tensor more": (lambda made: made.write("bad", other=torch.ones(2)), "has 'other'"),
    "integers": (lambda made: made.write("bad", layers_1_w=torch.ones(40, 30).int()), "is int32"),
    "fp8": (lambda made: made.write("bad", layers_1_w=torch.ones(40, 30).to(torch.float8_e4m3fn)), "float8"),
    "no model": (lambda made: made.folder / "nothing", "no such"),
    "half a file": (lambda made: _truncated(made.write("bad"), 3000), "model.safetensors"),
    "half a header": (lambda made: _truncated(made.write("bad"), 40), "model.safetensors"),
    "a damaged block": (_damaged_step, "the digest"),
    "other tokens": (lambda made: made.write("bad", tokens={"a": 1, "b": 0}), "the token"),
}


def refused(name: str, *, occupied: bool) -> None:
    """Merge with a model that does not fit: one clear error, and the target is as it was."""
    build, text = UNFIT[name]
    with models(occupied=occupied) as made:
        if name == "other tokens":
            (made.paths[0] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
        bad = build(made)
        try:
            made.merge([made.paths[0], bad])
        except holdfast.HoldfastError as error:
            if text not in str(error):
                raise Wrong(f"the error is not clear: {error!r}") from error
        else:
            raise Wrong("the merge succeeded")
        made.judge(done=False)
        if list(made.folder.glob(".attempt*")):
            raise Wrong("an attempt was left behind")


def refusals(seed: int) -> Tally:
    cases = [
        (f"{name}, {occupied=}", partial(refused, name, occupied=occupied))
        for name in UNFIT
        for occupied in (False, True)
    ]
    return run_cases(REFUSED, seed, cases)


ROWS = (Row(KILLED, killed), Row(FILLED, full), Row(REFUSED, refusals))
