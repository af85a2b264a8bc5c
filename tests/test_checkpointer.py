"""A run's checkpoints: steps, restoring, fallback, saving again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.run_identity import key_of, run_id
from holdfast.checkpoint.shared_memory import create_file, find_files
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex
from holdfast.storage.identity import IDENTITY
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage
from holdfast.writer.arena_card import pid_namespace


def state_of(value: float) -> dict[str, object]:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(value)
    return {"model": model, "step": value}


def value_of(state: dict[str, object]) -> float:
    model = state["model"]
    assert isinstance(model, nn.Linear)
    return float(model.weight.detach()[0, 0])


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != IDENTITY)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_restores_the_newest_and_records_the_parent(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "deep" / "run") as checkpointer:
        assert checkpointer.restore(state_of(0.0)) is None
        for step in (1, 10, 9):
            handle = checkpointer.save(step, state_of(float(step)))
            assert handle.stall_ms > 0 and handle.result().step == step and handle.done()
        assert handle.result().manifest.parent == 10
    state = state_of(0.0)
    again = holdfast.Checkpointer(tmp_path / "deep" / "run")
    assert again.restore(state) == 10 and value_of(state) == 10.0 and state["step"] == 10.0
    assert again.restore(state, step=1) == 1 and value_of(state) == 1.0
    assert again.steps() == [1, 9, 10]
    with pytest.raises(holdfast.NotFound, match="step 5"):
        again.restore(state, step=5)


def test_works_in_memory_too() -> None:
    checkpointer = holdfast.Checkpointer(MemoryStorage())
    checkpointer.save(3, state_of(3.0)).result()
    state = state_of(0.0)
    assert checkpointer.restore(state) == 3 and value_of(state) == 3.0


def test_damage_is_skipped_with_a_warning_and_named(tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, state_of(float(step))).result()
    flip(tmp_path / "step-000000000003" / "model-00001-of-00001.safetensors")
    flip(tmp_path / "step-000000000002" / "holdfast.json")
    state = state_of(0.0)
    with pytest.warns(holdfast.HoldfastWarning, match="step 3"):
        assert checkpointer.restore(state) == 1
    assert value_of(state) == 1.0
    with pytest.raises(holdfast.Damaged):
        checkpointer.restore(state, step=3)
    flip(tmp_path / "step-000000000001" / "model-00001-of-00001.safetensors")
    with pytest.raises(holdfast.Damaged, match="no checkpoint is good"):
        checkpointer.restore(state)


def test_a_failed_save_warns_and_training_goes_on(tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path)
    checkpointer.save(1, state_of(1.0)).result()
    with pytest.warns(holdfast.HoldfastWarning, match="step 2 was not saved"):
        handle = checkpointer.save(2, {"odd": object()})
    with pytest.raises(holdfast.Unsupported, match="odd"):
        handle.result()
    assert checkpointer.steps() == [1]
    assert names(tmp_path) == ["step-000000000001"]


def test_a_step_says_how_long_training_waited_for_it(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, keep=None) as ck:
        for step in (1, 2):
            began = time.perf_counter()
            handle = ck.save(step, state_of(step))
            took_ms = (time.perf_counter() - began) * 1000
            stall_ms = handle.result().manifest.writer["stall_ms"]
            assert 0 < stall_ms <= took_ms + 0.1


def test_saving_the_same_again_is_a_no_op_and_other_content_replaces(tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path)
    first = checkpointer.save(1, state_of(1.0)).result().manifest.attempt
    assert checkpointer.save(1, state_of(2.0)).result().manifest.attempt != first
    state = state_of(0.0)
    checkpointer.restore(state)
    assert value_of(state) == 2.0
    kept = checkpointer.save(1, state).result().manifest.attempt
    assert checkpointer.save(1, state).result().manifest.attempt == kept
    assert names(tmp_path) == ["step-000000000001"]


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(holdfast.StorageError, match=r"thesis\.txt"):
        holdfast.save(tmp_path / "mine", state_of(1.0))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    holdfast.save(tmp_path / "ours", state_of(1.0))
    (tmp_path / "ours" / "tokenizer.json").write_text("{}")
    with pytest.raises(holdfast.StorageError, match=r"tokenizer\.json"):
        holdfast.save(tmp_path / "ours", state_of(2.0))


@pytest.mark.parametrize("step", [-1, 1.0, True, "3"])
def test_odd_steps_are_refused(tmp_path: Path, step: object) -> None:
    with pytest.raises(holdfast.InvalidArgument, match="step"):
        holdfast.Checkpointer(tmp_path).save(step, state_of(1.0))  # type: ignore[arg-type]


def test_numbers_that_are_whole_are_steps(tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path)
    whole: list[Any] = [np.int64(3), torch.tensor(4)]
    assert [checkpointer.save(step, state_of(1.0)).result().step for step in whole] == [3, 4]


def test_the_root_is_fixed_when_the_checkpointer_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    checkpointer, home = holdfast.Checkpointer("run"), holdfast.Checkpointer("~/home")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpointer.save(1, state_of(1.0)).result()
    home.save(1, state_of(1.0)).result()
    assert checkpointer.steps() == [1] and not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "home" / "step-000000000001").is_dir()


def test_a_step_is_not_a_root_and_a_closed_checkpointer_saves_no_more(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1.0)).result()
    with pytest.raises(holdfast.Unsupported, match="closed"):
        checkpointer.save(2, state_of(2.0))
    with pytest.raises(holdfast.Unsupported, match="the folder above it"):
        holdfast.Checkpointer(tmp_path / "step-000000000001")


def test_importing_holdfast_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import holdfast, sys; holdfast.open, holdfast.Checkpointer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_saving_again_over_rot_replaces_it(tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path)
    state = state_of(1.0)
    checkpointer.save(1, state).result()
    flip(tmp_path / "step-000000000001" / "model-00001-of-00001.safetensors")
    assert checkpointer.save(1, state).result().verify().good


def test_a_newer_format_is_never_passed_over(tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, state_of(float(step))).result()
    manifest = tmp_path / "step-000000000002" / "holdfast.json"
    fields = strictjson.loads(manifest.read_bytes(), "manifest")
    del fields["digest"]
    fields["version"] = [2, 0]
    manifest.write_bytes(strictjson.dumps({**fields, "digest": digest_hex(strictjson.dumps(fields))}) + b"\n")
    with pytest.raises(holdfast.Unsupported, match="install a newer version"):
        checkpointer.restore(state_of(0.0))
    handle = checkpointer.save(2, state_of(9.0))
    with pytest.raises(holdfast.Unsupported, match="install a newer version"):
        handle.result()
    with pytest.warns(holdfast.HoldfastWarning, match="install a newer version"):
        checkpointer.close()
    assert manifest.exists()


def test_what_lies_deep_in_a_folder_is_never_deleted(tmp_path: Path) -> None:
    run = holdfast.Checkpointer(tmp_path / "exps" / "llama")
    run.save(1, state_of(1.0)).result()
    with pytest.raises(holdfast.StorageError, match="did not write"):
        holdfast.save(tmp_path / "exps", state_of(2.0))
    assert run.steps() == [1]
    holdfast.save(tmp_path / "ours", state_of(1.0))
    (tmp_path / "ours" / "a" / "b").mkdir(parents=True)
    (tmp_path / "ours" / "a" / "b" / "thesis").write_text("years")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "l").symlink_to(tmp_path)
    for name in ("ours", "links"):
        with pytest.raises(holdfast.StorageError, match="did not write"):
            holdfast.save(tmp_path / name, state_of(2.0))
    (tmp_path / "ours" / "holdfast.json").write_text("spoiled")
    with pytest.raises(holdfast.StorageError, match="did not write"):
        holdfast.save(tmp_path / "ours", state_of(2.0))


def test_headers_stay_within_what_readers_accept(tmp_path: Path) -> None:
    tensors = {f"{'k' * 1000}{index:05d}": torch.zeros(1) for index in range(9000)}
    checkpoint = holdfast.save(tmp_path / "x", {"w": tensors})
    assert len(checkpoint.manifest.groups["w"].files) > 1 and len(checkpoint.keys("w")) == 9000


def test_a_handle_outlives_its_checkpointer(tmp_path: Path) -> None:
    assert holdfast.Checkpointer(tmp_path).save(1, state_of(1.0)).result(30).step == 1


def test_a_listener_that_raises_stops_nothing(tmp_path: Path) -> None:
    def listen(event: holdfast.Event) -> None:
        raise RuntimeError(event.name)

    with holdfast.Checkpointer(tmp_path, on_event=listen) as checkpointer:
        for step in (1, 2):
            assert checkpointer.save(step, state_of(float(step))).result(30).step == step


def test_without_room_for_an_arena_saves_block_and_say_so(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, arena_bytes=10) as checkpointer:
        with pytest.warns(holdfast.HoldfastWarning, match="saves block"):
            assert checkpointer.save(1, state_of(1.0)).done()
        assert checkpointer.save(2, state_of(2.0)).done() and checkpointer.steps() == [1, 2]


def test_closing_while_it_gets_ready_leaves_nothing(tmp_path: Path) -> None:
    model = nn.Linear(3000, 3000)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    run = run_id(LocalStorage(tmp_path))
    for _ in range(5):
        with holdfast.Checkpointer(tmp_path) as checkpointer:
            checkpointer.prepare(state)
        assert find_files(run) == []


def test_a_second_run_on_the_same_root_is_warned_of(tmp_path: Path) -> None:
    code = (
        f"import torch, holdfast; ck = holdfast.Checkpointer({str(tmp_path)!r})\n"
        "ck.save(1, {'w': torch.ones(3)}).result(60); print('saved', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"saved\n"
        with holdfast.Checkpointer(tmp_path) as second, pytest.warns(holdfast.HoldfastWarning, match="another run"):
            second.restore({"w": torch.ones(3)})
        first.communicate(b"\n", timeout=60)


def test_warnings_point_to_the_users_line(tmp_path: Path) -> None:
    (tmp_path / "step-000000000001").mkdir()
    (tmp_path / "step-000000000001" / "thesis.txt").write_text("years of work")
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, {"w": torch.ones(3)})
        handle.wait(60)
        with pytest.warns(holdfast.HoldfastWarning, match="thesis") as caught:
            checkpointer.save(2, {"w": torch.ones(3)})
        assert caught[0].filename == __file__


def test_arguments_are_checked_where_they_are_given(tmp_path: Path) -> None:
    for wrong in ({"model_dtype": "float33"}, {"ties": {"a": 1}}, {"ties": ["a"]}):
        with pytest.raises(holdfast.HoldfastError):
            holdfast.Checkpointer(tmp_path, **wrong)
    with pytest.raises(holdfast.InvalidArgument, match="empty"):
        holdfast.Checkpointer("")
    with holdfast.Checkpointer(tmp_path) as checkpointer, pytest.raises(holdfast.InvalidArgument, match="largest step"):
        checkpointer.save(10**20, {"w": torch.ones(3)})


def test_a_first_save_that_cannot_begin_is_a_failed_save(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("not a folder")
    with holdfast.Checkpointer(root) as checkpointer:
        with pytest.warns(holdfast.HoldfastWarning, match="step 1 was not saved"):
            handle = checkpointer.save(1, {"w": torch.ones(3)})
        with pytest.raises(holdfast.HoldfastError):
            handle.result(10)


def test_an_interrupt_while_capturing_fails_that_save_alone(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
        copier = checkpointer._engine.background._capturer.copier
        start = copier.start
        copier.start = lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(2, {"w": torch.ones(3)})
        copier.start = start
        with pytest.warns(holdfast.HoldfastWarning, match="step 2 was not saved: interrupted"):
            checkpointer.save(3, {"w": torch.ones(3)}).result(60)
    assert checkpointer.steps() == [1, 3]


def test_threads_take_turns(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        with ThreadPoolExecutor(4) as pool:
            handles = list(pool.map(lambda step: checkpointer.save(step, {"w": torch.ones(3)}), range(12)))
        for handle in handles:
            handle.result(60)
    assert checkpointer.steps() == list(range(12))


def test_a_second_checkpointer_of_the_process_waits_for_the_first(tmp_path: Path) -> None:
    first = holdfast.Checkpointer(tmp_path)
    first.save(1, {"w": torch.ones(5_000_000)})
    with holdfast.Checkpointer(tmp_path) as second:
        assert second.restore({"w": torch.zeros(5_000_000)}) == 1
    first.close()


def test_a_load_that_is_not_strict_says_what_it_left_out(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": {"a": torch.ones(3), "b": torch.ones(2)}}).result(60)
        with pytest.warns(holdfast.HoldfastWarning, match=r"(?s)^restored step 1, not all of it as .*w: b"):
            checkpointer.restore({"w": {"a": torch.ones(3), "b": torch.ones(4)}}, strict=False)


def test_a_last_save_that_failed_stays_in_memory(tmp_path: Path) -> None:
    (tmp_path / "step-000000000001").mkdir()
    (tmp_path / "step-000000000001" / "thesis.txt").write_text("years of work")
    with pytest.warns(holdfast.HoldfastWarning, match="thesis"), holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.full((3,), 7.0)}).wait(60)
    (tmp_path / "step-000000000001" / "thesis.txt").unlink()
    (tmp_path / "step-000000000001").rmdir()
    fresh = {"w": torch.zeros(3)}
    with pytest.warns(holdfast.HoldfastWarning, match="memory of this host"), holdfast.Checkpointer(tmp_path) as again:
        assert again.restore(fresh) == 1
    assert fresh["w"].tolist() == [7.0] * 3 and again.steps() == [1]
    assert find_files(run_id(LocalStorage(tmp_path))) == []


def test_an_arena_of_a_dead_process_with_our_number_is_removed(tmp_path: Path) -> None:
    identity = LocalStorage(tmp_path).identity(make=True)
    assert identity is not None
    path = Path(create_file(4096, f"{key_of(identity)}-0-{os.getpid()}-1-{pid_namespace()}-", in_memory=True))
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
    assert not path.exists()


@pytest.mark.parametrize("wrong", [None, 3, b"root"])
def test_what_is_no_root_is_refused(wrong: object) -> None:
    with pytest.raises(holdfast.Unsupported, match="neither a path nor a Storage"):
        holdfast.Checkpointer(wrong)  # type: ignore[arg-type]


def test_states_that_are_none_are_refused(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        for call in (checkpointer.prepare, checkpointer.restore, lambda state: checkpointer.save(1, state)):
            with pytest.raises(holdfast.Unsupported, match="a NoneType: give a dict"):
                call(None)  # type: ignore[arg-type]
        with pytest.raises(holdfast.InvalidArgument, match="whole number"):
            checkpointer.restore({"w": torch.ones(1)}, step="3")  # type: ignore[arg-type]
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
        writer = checkpointer._engine.background.writer.pid
        os.kill(writer, signal.SIGSTOP)
        try:
            with pytest.raises(holdfast.TimedOut):
                checkpointer.save(2, {"w": torch.ones(3)}).result(0.0)
        finally:
            os.kill(writer, signal.SIGCONT)


def test_a_value_that_contains_itself_is_refused_by_name(tmp_path: Path) -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(holdfast.Unsupported, match=r"note.*contains itself"):
        holdfast.save(tmp_path / "x", {"note": loop})


def test_a_step_that_is_none_is_refused_after_preparing_too(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, state_of(5.0)).result()
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state_of(1.0))
        with pytest.raises(holdfast.InvalidArgument, match="whole number"):
            checkpointer.save("one", state_of(1.0))  # type: ignore[arg-type]


def test_a_run_that_restored_nothing_hears_once_of_higher_steps(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(9, state_of(9.0)).result()
    events: list[holdfast.Event] = []
    with holdfast.Checkpointer(tmp_path, on_event=events.append) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(1.0)).result()
    assert [event.step for event in events if event.name == "unrestored"] == [1]


def test_a_model_dtype_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match="choose 'bfloat16' or 'float16'"):
        holdfast.Checkpointer(tmp_path, model_dtype="int8")
