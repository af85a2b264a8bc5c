"""Bad input: one clear error on every rank, no hang, and earlier checkpoints untouched."""

from __future__ import annotations

import os
import resource
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.sliced(4)


def sharded(value: float = 1.0, rows: int = 8) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    local = torch.full((rows // dist.get_world_size(), 3), value)
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}


def caught(work: Callable[[], Any]) -> tuple[str, str]:
    """The error's class and message, which every rank must give."""
    try:
        work()
    except holdfast.HoldfastError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def first_then(root: str, bad: dict[str, Any], **options: Any) -> tuple[str, str]:
    """Commit a good checkpoint, then try to save `bad` over it and beside it."""
    holdfast.save(f"{root}/good", {"weights": sharded()})
    beside = caught(lambda: holdfast.save(f"{root}/bad", bad, **options))
    over = caught(lambda: holdfast.save(f"{root}/good", bad, **options))
    assert over == beside
    return beside


def assert_untouched(root: Path) -> None:
    checkpoint = holdfast.open(root / "good")
    assert checkpoint.verify().good
    assert checkpoint.read("w").tolist() == [[1.0] * 3] * 8
    assert sorted(path.name for path in root.iterdir()) == ["good"], "something was left behind"


def one_error(errors: list[tuple[str, str]], kind: str, *words: str) -> None:
    assert len(set(errors)) == 1, f"ranks say different things: {errors}"
    assert errors[0][0] == kind, errors[0]
    for word in words:
        assert word in errors[0][1], errors[0][1]


def _hole(root: str) -> tuple[str, str]:
    weights = sharded()
    other = weights if dist.get_rank() != 1 else {}
    return first_then(root, {"weights": {"x": torch.zeros(1), **other}})


def test_a_shard_missing_on_one_rank_is_a_hole(tmp_path: Path) -> None:
    one_error(run_ranks(2, _hole, str(tmp_path)), "LayoutError", "weights: w", "[4:8, 0:3]")
    assert_untouched(tmp_path)


def _shape(root: str) -> tuple[str, str]:
    return first_then(root, {"weights": {"w": torch.zeros(3 + dist.get_rank())}})


def test_a_shape_that_differs_between_ranks(tmp_path: Path) -> None:
    one_error(run_ranks(2, _shape, str(tmp_path)), "LayoutError", "float32[4] on rank 1", "float32[3] on rank 0")
    assert_untouched(tmp_path)


def _replicas(root: str) -> tuple[str, str]:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
        if dist.get_rank() == 2:
            model.weight[3, 3] = 1.0000001
    error = first_then(root, {"model": model})
    holdfast.save(f"{root}/forced", {"model": model}, replicas="first")
    return error


def test_replicas_that_differ_in_one_element(tmp_path: Path) -> None:
    one_error(run_ranks(3, _replicas, str(tmp_path)), "LayoutError", "model: weight", "rank 0 and rank 2")
    assert holdfast.open(tmp_path / "forced").read("weight").max() == 1.0


def _batch_norm(root: str) -> tuple[list[str], float]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(4), broadcast_buffers=False)
    model(torch.randn(8, 4) + dist.get_rank())
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        checkpoint = holdfast.save(f"{root}/bn", {"model": model})
    said = [str(w.message) for w in caught_warnings if issubclass(w.category, holdfast.HoldfastWarning)]
    same = float(abs(checkpoint.read("running_mean") - model.module.running_mean.numpy()).max())
    assert checkpoint.manifest.writer["first_replica"] == ["model: running_mean"]
    return said, same


def test_batch_norm_statistics_that_differ_are_saved_and_reported(tmp_path: Path) -> None:
    (said, first), (silent, second) = run_ranks(2, _batch_norm, str(tmp_path))
    assert "model: running_mean" in said[0] and not silent
    assert first == 0.0 < second, "the first replica's value is the one that is saved"


def _first_replica(root: str) -> list[float]:
    model = nn.Module()
    model.register_buffer("wide", torch.full((40_000,), float(dist.get_rank())))
    model.register_parameter("w", nn.Parameter(torch.zeros(40_000)))
    checkpointer = holdfast.Checkpointer(root, block_bytes=4096)
    for step in (1, 2):
        saved = checkpointer.save(step, {"model": model}).result()
        found = sorted(set(saved.read("wide").tolist()))
    return found


def test_the_first_replica_is_one_replica_and_not_a_mix(tmp_path: Path) -> None:
    assert run_ranks(3, _first_replica, str(tmp_path)) == [[0.0]] * 3


def _warnings_are_errors(root: str) -> str:
    warnings.simplefilter("error", holdfast.HoldfastWarning)
    model = nn.Module()
    model.register_buffer("b", torch.full((4,), float(dist.get_rank())))
    try:
        holdfast.save(f"{root}/x", {"model": model})
    except holdfast.HoldfastWarning as warning:
        return str(warning)
    return "saved"


def test_a_warning_that_is_made_an_error_leaves_nobody_waiting(tmp_path: Path) -> None:
    said = run_ranks(2, _warnings_are_errors, str(tmp_path))
    assert "model: b" in said[0] and said[1] == "saved"


def _different_names(root: str) -> tuple[str, str]:
    model, critic = nn.Linear(2, 2), nn.Linear(2, 2)
    for module in (model, critic):
        for parameter in module.parameters():
            nn.init.ones_(parameter)
    holdfast.save(f"{root}/x", {"model": model, "critic": nn.Sequential(critic, critic)})
    nn.init.zeros_(model.weight)
    state = {"model": model, "critic": critic} if dist.get_rank() == 0 else {"model": model}
    error = caught(lambda: holdfast.load(f"{root}/x", state))
    assert float(model.weight.detach().sum()) == 0.0, "nothing was loaded, on any rank"
    return error


def test_states_with_different_names_fail_alike_and_load_nothing(tmp_path: Path) -> None:
    one_error(run_ranks(2, _different_names, str(tmp_path)), "Mismatch", "not in the live state: critic: 0.weight")


def _options(root: str) -> tuple[str, str]:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
    return first_then(root, {"model": model, "optimizer": optimizer})


def test_options_that_differ_between_ranks(tmp_path: Path) -> None:
    one_error(run_ranks(2, _options, str(tmp_path)), "LayoutError", "optimizer: ", "different options (lr")
    assert_untouched(tmp_path)


def _odd_argument(root: str) -> tuple[str, str]:
    first = dist.get_rank() == 0
    odd: Any = 7 if first else 7.5
    step = caught(lambda: holdfast.Checkpointer(root).save(odd, {"weights": sharded()}))
    option = caught(lambda: holdfast.save(f"{root}/x", {"weights": sharded()}, replicas="oops" if first else "error"))
    assert "replicas='oops'" in option[1]
    return step


def test_an_odd_argument_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    one_error(run_ranks(2, _odd_argument, str(tmp_path)), "InvalidArgument", "rank 1", "step=7.5")


def _absent(root: str) -> tuple[str, str]:
    if dist.get_rank() == 0:
        said = caught(lambda: holdfast.save(f"{root}/x", {"weights": {"a": torch.zeros(1)}}, deadline_s=3))
        Path(root, "told").touch()
        return said
    end = time.monotonic() + 120
    while not Path(root, "told").exists() and time.monotonic() < end:
        time.sleep(0.05)
    return "", ""


def test_a_rank_that_does_not_come_is_named_for_what_it_is(tmp_path: Path) -> None:
    kind, text = run_ranks(2, _absent, str(tmp_path))[0]
    assert kind == "PeerFailed" and "a rank exited, or did not arrive within 3 s; every rank must call save" in text


def _not_json(root: str) -> tuple[str, str]:
    note: Any = {"fine": 1} if dist.get_rank() == 0 else {"deep": [{"odd": object()}]}
    return first_then(root, {"weights": sharded(), "note": note})


def test_a_value_that_is_not_json_on_one_rank(tmp_path: Path) -> None:
    errors = run_ranks(2, _not_json, str(tmp_path))
    one_error(errors, "Unsupported", "rank 1", "note.deep[0].odd", "builtins.object")
    assert_untouched(tmp_path)


def _different_places(root: str) -> tuple[str, str]:
    return caught(lambda: holdfast.save(f"{root}/{dist.get_rank()}", {"weights": sharded()}))


def test_ranks_that_save_to_different_places(tmp_path: Path) -> None:
    one_error(run_ranks(2, _different_places, str(tmp_path)), "LayoutError", "different paths")


def _full_disk(root: str) -> tuple[str, str]:
    holdfast.save(f"{root}/good", {"weights": sharded()})
    if dist.get_rank() == 1:
        # Only one rank meets the limit, and only when it writes.
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    return caught(lambda: holdfast.save(f"{root}/bad", {"weights": sharded(2.0, rows=40_000)}, block_bytes=65536))


def test_a_rank_that_cannot_write(tmp_path: Path) -> None:
    errors = run_ranks(2, _full_disk, str(tmp_path))
    one_error(errors, "StorageError", "rank 1", "weights-00001-of-00001", "File too large")
    assert_untouched(tmp_path)


def _small_disk(root: str) -> tuple[str, str]:
    holdfast.save(f"{root}/good", {"weights": sharded()})
    return caught(lambda: holdfast.save(f"{root}/bad", {"weights": sharded(2.0, rows=400_000)}))


def test_a_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.decode().strip()}")
    try:
        errors = run_ranks(2, _small_disk, str(tmp_path))
        one_error(errors, "StorageError", "No space left", "weights-00001-of-00001.safetensors", "free some space")
        assert_untouched(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {}


def damage(*words: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(work: Callable[[Path], None]) -> Callable[[Path], None]:
        DAMAGE[work.__name__] = (work, words)
        return work

    return add


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


TENSORS = "weights-00001-of-00001.safetensors"


@damage(TENSORS, "header")
def a_damaged_header(folder: Path) -> None:
    flip(folder / TENSORS, 20)


@damage(TENSORS, "the header claims")
def a_huge_header(folder: Path) -> None:
    flip(folder / TENSORS, 6)


@damage(TENSORS, "is missing")
def a_missing_file(folder: Path) -> None:
    (folder / TENSORS).unlink()


@damage(TENSORS, "bytes, but the manifest records")
def a_truncated_file(folder: Path) -> None:
    os.truncate(folder / TENSORS, 150)


@damage(TENSORS, "digest", "It holds w")
def a_digest_that_does_not_match(folder: Path) -> None:
    flip(folder / TENSORS, -1)


@damage("holdfast.json", "digest")
def a_damaged_manifest(folder: Path) -> None:
    data = (folder / "holdfast.json").read_bytes()
    (folder / "holdfast.json").write_bytes(data.replace(b'"parent":null', b'"parent":1234'))


@damage("state.json", "digest")
def a_damaged_state(folder: Path) -> None:
    flip(folder / "state.json", 30)


def _load_damaged(root: str) -> tuple[str, str]:
    state = {"weights": sharded(5.0), "note": "live"}
    error = caught(lambda: holdfast.load(f"{root}/bad", state))
    assert state["note"] == "live"
    report = holdfast.load(f"{root}/good", state)
    assert report.missing == () and float(state["weights"]["w"].to_local().max()) == 1.0
    return error


def _save_two(root: str) -> None:
    holdfast.save(f"{root}/good", {"weights": sharded(), "note": "stored"})
    holdfast.save(f"{root}/bad", {"weights": sharded(), "note": "stored"})


@pytest.mark.parametrize("name", DAMAGE)
def test_loading_damage(tmp_path: Path, name: str) -> None:
    run_ranks(2, _save_two, str(tmp_path))
    work, words = DAMAGE[name]
    work(tmp_path / "bad")
    one_error(run_ranks(2, _load_damaged, str(tmp_path)), "Damaged", *words)


def _restore(root: str) -> tuple[int | None, float, str]:
    state = {"weights": sharded(9.0), "note": "live"}
    checkpointer = holdfast.Checkpointer(root)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = checkpointer.restore(state)
    value = float(state["weights"]["w"].to_local().max())
    return step, value, "".join(str(w.message) for w in said if issubclass(w.category, holdfast.HoldfastWarning))


def _save_steps(root: str) -> None:
    checkpointer = holdfast.Checkpointer(root)
    for step in (1, 2, 3):
        checkpointer.save(step, {"weights": sharded(float(step)), "note": step}).result()


def test_restore_falls_back_on_every_rank_when_one_sees_damage(tmp_path: Path) -> None:
    run_ranks(2, _save_steps, str(tmp_path))
    flip(tmp_path / "step-000000000003" / TENSORS, -1)  # in rank 1's rows
    (first, value, said), (second, other, _) = run_ranks(2, _restore, str(tmp_path))
    assert (first, second) == (2, 2)
    assert (value, other) == (2.0, 2.0)
    assert "step 3" in said and "digest" in said


def _restore_nothing(root: str) -> tuple[str, str]:
    state = {"weights": sharded(9.0), "note": "live"}
    return caught(lambda: holdfast.Checkpointer(root).restore(state))


def test_when_no_step_is_good_every_rank_raises(tmp_path: Path) -> None:
    run_ranks(2, _save_steps, str(tmp_path))
    for step in (1, 2, 3):
        flip(tmp_path / f"step-{step:012d}" / TENSORS, -1)  # in rank 1's rows
    one_error(
        run_ranks(2, _restore_nothing, str(tmp_path)), "Damaged", "no checkpoint is good", "overwritten", "step 1"
    )


def ask_differently(root: str, options: dict[str, Any], restoring: bool) -> str:
    own = options if dist.get_rank() == 1 else {}
    state = {"w": torch.zeros(5)}
    started = time.monotonic()
    try:
        if restoring:
            holdfast.Checkpointer(root, deadline_s=60).restore(state, **own)
        else:
            holdfast.load(f"{root}/step-000000000001", state, deadline_s=60, **own)
    except holdfast.HoldfastError as error:
        assert time.monotonic() - started < 30, "the others waited"
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nobody noticed")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"read_once": "x"}, "InvalidArgument: rank 1: read_once='x'"),
    ({"memory_bytes": "banana"}, "InvalidArgument: rank 1: not a size: 'banana'"),
    ({"progress": 5}, "InvalidArgument: rank 1: progress=5"),
    ({"only": 5}, "InvalidArgument: rank 1: patterns are a list of strings, not 5"),
    ({"verify": False}, "InvalidArgument: the ranks must load with the same options"),
]
MAPPED: tuple[dict[str, Any], str] = ({"mapping": ["w -> w"]}, "InvalidArgument: the ranks are at different points")


@pytest.mark.sliced(6)
@pytest.mark.parametrize(
    ("options", "text", "restoring"),
    [(*case, restoring) for case in WRONG for restoring in (False, True)] + [(*MAPPED, False)],
)
def test_an_option_of_one_rank_fails_every_rank_alike(
    tmp_path: Path, options: dict[str, Any], text: str, restoring: bool
) -> None:
    with holdfast.Checkpointer(tmp_path) as run:
        run.save(1, {"w": torch.ones(5)}).result()
    answers = run_ranks(2, ask_differently, str(tmp_path), options, restoring)
    assert len(set(answers)) == 1 and answers[0].startswith(text), answers
