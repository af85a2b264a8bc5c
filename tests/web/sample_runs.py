"""Make roots for the page to show: `python -m tests.web.sample_runs FOLDER [NAME ...]`.

`training` trains, is killed and resumes (needs torch); `many` has 5,000 steps, `keys` 100,000 keys, `damaged` a
step with a flipped byte and one with a broken manifest, `branches` tags, a rewind and a policy, `hostile` names
and numbers that an attacker would choose. All but `training` take a few seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.commit import small_file_record
from holdfast.checkpoint.retention import _save_policy
from holdfast.checkpoint.tags import add_tag
from holdfast.core.limits import BLOCK_BYTES
from holdfast.core.names import abandoned_folder, index_file, step_folder
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.dtypes import dtype_named
from holdfast.format.manifest import BlockRecord, FileRecord, GroupRecord, Manifest, encode_manifest
from holdfast.format.safetensors import encode_index
from holdfast.keep import parse
from holdfast.plan.files import TensorSpec, split_group
from holdfast.storage.local import LocalStorage

CONFIG = """
[model]
family = "llama"
vocab_size = 64
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 3
num_attention_heads = 2
num_key_value_heads = 2

[data]
kind = "synthetic"
samples = 512
sequence = 16

[optimizer]
lr = 3e-3

[train]
folder = "{folder}"
steps = {steps}
global_batch = 4
micro_batch = 4

[checkpoint]
every_steps = {every}
keep_last = 4
"""


def train(folder: Path, steps: int = 60, every: int = 10, *, kill_at: int | None = None) -> subprocess.Popen[bytes]:
    """Start `holdfast train` on a tiny model; with `kill_at`, kill it once it has passed that step, and wait."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder.parent / f"{folder.name}.toml"
    config.write_text(CONFIG.format(folder=folder, steps=steps, every=every))
    command = [sys.executable, "-m", "holdfast", "train", str(config)]
    log = (folder.parent / f"{folder.name}.log").open("ab")
    process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    log.close()
    if kill_at is None:
        return process
    deadline = time.monotonic() + 240
    while last_step(folder) < kill_at and process.poll() is None:
        assert time.monotonic() < deadline, f"no step {kill_at} within four minutes"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return process


def last_step(folder: Path) -> int:
    """The last step in a training run's metrics, 0 without one."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = []
    for line in lines[-5:]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "loss" in record and "event" not in record:
            steps.append(record["step"])
    return max(steps, default=0)


def training(folder: Path) -> None:
    """A run that was killed at step 25 and resumed from step 20."""
    train(folder, kill_at=25)
    assert train(folder).wait(timeout=240) == 0


def write_step(
    root: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, np.ndarray]],
    *,
    folder: str | None = None,
    state: Mapping[str, Any] | None = None,
    parent: int | None = None,
    writer: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float | None] | None = None,
    created: str = "2026-11-19T08:00:00+00:00",
    max_shard_bytes: int = 5 * 10**9,
    **lineage: Any,
) -> Path:
    """Write a step without torch, an engine or syncing: groups of numpy arrays, and entries of state.json."""
    path = root / (folder or step_folder(step))
    path.mkdir(parents=True)
    records: dict[str, FileRecord] = {}
    groups: dict[str, GroupRecord] = {}
    for group, members in tensors.items():
        specs = [TensorSpec(key, dtype_named(array.dtype.name), array.shape) for key, array in members.items()]
        files = split_group(group, specs, max_shard_bytes)
        for file in files:
            data = b"".join([file.header, *(members[place.spec.key].tobytes() for place in file.places)])
            (path / file.name).write_bytes(data)
            header = BlockRecord(0, len(file.header), digest_hex(file.header))
            records[file.name] = FileRecord(len(data), small_file_record(data, BLOCK_BYTES).blocks, header)
        keys = {place.spec.key: file.name for file in files for place in file.places}
        total = sum(spec.bytes for spec in specs)
        groups[group] = GroupRecord(
            "optimizer" if group == "optimizer" else "module", tuple(f.name for f in files), total
        )
        _put(path, records, index_file(group), encode_index(keys, total))
    _put(path, records, "state.json", strictjson.dumps({"version": 1, "entries": dict(state or {})}) + b"\n")
    manifest = Manifest(
        step=step,
        parent=parent,
        attempt=f".attempt-{step:016x}",
        created=created,
        block_bytes=BLOCK_BYTES,
        groups=groups,
        files=records,
        writer=writer or {"holdfast": "0.1.0", "world": 8, "hosts": 1, "mesh": {"dp": 4, "tp": 2}, "seconds": 1.5},
        metrics=metrics or {},
        **lineage,
    )
    (path / "holdfast.json").write_bytes(encode_manifest(manifest))
    return path


def _put(path: Path, records: dict[str, FileRecord], name: str, data: bytes) -> None:
    (path / name).write_bytes(data)
    records[name] = small_file_record(data, BLOCK_BYTES)


def light_steps(root: Path, steps: Iterable[int]) -> None:
    """Write steps of one tiny tensor each, with a loss that falls."""
    before: int | None = None
    for number, step in enumerate(steps):
        minutes, seconds = divmod(number * 7, 60)
        hours, minutes = divmod(minutes, 60)
        write_step(
            root,
            step,
            {"model": {"w": np.full(4, step, np.float32)}},
            parent=before,
            metrics={"loss": 4.0 / (1 + number / 50)},
            created=f"2026-11-{1 + hours // 24:02d}T{hours % 24:02d}:{minutes:02d}:{seconds:02d}+00:00",
            writer={"holdfast": "0.1.0", "world": 8, "hosts": 1, "mesh": {"dp": 8}, "seconds": 1 + number % 9 / 10},
        )
        before = step


def many(folder: Path, count: int = 5000) -> None:
    """A root with 5,000 light steps."""
    light_steps(folder, range(10, 10 * count + 1, 10))


def mixture_keys(layers: int = 61, experts: int = 544) -> list[str]:
    """The keys of a large mixture of experts: about 100,000 for 61 layers."""
    keys = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(layers):
        head = f"model.layers.{layer}"
        keys += [f"{head}.self_attn.{name}_proj.weight" for name in "qkvo"]
        keys += [
            f"{head}.mlp.experts.{expert}.{name}_proj.weight"
            for expert in range(experts)
            for name in ("gate", "up", "down")
        ]
        keys += [f"{head}.mlp.gate.weight", f"{head}.input_layernorm.weight"]
    return keys


def keys(folder: Path) -> None:
    """A root with one checkpoint of 100,000 keys, 25 MB."""
    rows = np.zeros((8, 8), np.float32)
    write_step(folder, 1000, {"model": dict.fromkeys(mixture_keys(), rows)})


def model_arrays(seed: int, layers: int = 4, changed: Iterable[int] = ()) -> dict[str, np.ndarray]:
    """The weights of a small model; those of the `changed` layers differ with the seed."""
    same = np.random.default_rng(0)
    moved = np.random.default_rng(seed)
    arrays = {"model.embed_tokens.weight": same.normal(size=(64, 16)).astype(np.float32)}
    changed = set(changed)
    for layer in range(layers):
        for name, shape in (("self_attn.q_proj", (16, 16)), ("mlp.up_proj", (32, 16)), ("mlp.down_proj", (16, 32))):
            value = same.normal(size=shape)
            if layer in changed:
                value = value + 0.05 * 2**layer * moved.normal(size=shape)
            arrays[f"model.layers.{layer}.{name}.weight"] = value.astype(np.float32)
    return arrays


def damaged(folder: Path) -> None:
    """Steps 10 to 40: a byte of step 20's tensors is flipped, step 30's manifest is broken."""
    for step in (10, 20, 30, 40):
        write_step(folder, step, {"model": model_arrays(step, changed=(1, 3))}, parent=step - 10 or None)
    file = folder / step_folder(20) / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    manifest = folder / step_folder(30) / "holdfast.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":30', b'"step":31'))


def branches(folder: Path) -> None:
    """Steps with two tags, a policy, a rewind from 40 to 20, a step set aside, and one found damaged."""
    optimizer = {"optimizer": {"model.norm.weight/exp_avg": np.ones(4, np.float32)}}
    options = {"lr": 0.001, "betas": {"$tuple": [0.9, 0.95]}, "weight_decay": 0.1}
    state = {
        "optimizer": {
            "kind": "optimizer",
            "groups": [{"params": ["model.norm.weight"], "options": options}],
            "values": {},
        },
        "note": {"kind": "json", "value": {"any": "json", "list": list(range(300)), "<b>": "</script>"}},
    }
    for step in (10, 20):
        write_step(
            folder,
            step,
            {"model": model_arrays(step, changed=(1,)), **optimizer},
            state=state,
            parent=step - 10 or None,
        )
    for step in (30, 40):
        name = abandoned_folder(step)
        write_step(folder, step, {"model": model_arrays(step)}, folder=name, parent=step - 10)
    left = ((30, f".attempt-{30:016x}"), (40, f".attempt-{40:016x}"))
    write_step(
        folder,
        35,
        {"model": model_arrays(35, changed=(2,))},
        parent=20,
        abandons=left,
        created="2026-11-19T09:00:00+00:00",
    )
    write_step(folder, 45, {"model": model_arrays(45, changed=(2, 3))}, parent=35, created="2026-11-19T10:00:00+00:00")
    write_step(folder, 15, {"model": model_arrays(15)}, folder="damaged-" + step_folder(15), parent=10)
    storage = LocalStorage(folder)
    by_step = {entry.step: entry for entry in committed_steps(storage)}
    add_tag(storage, "best", by_step[20])
    add_tag(storage, "released", by_step[35])
    _save_policy(storage, parse("last(2) | every(20)"))


HOSTILE_KEYS = (
    "<img src=x onerror=alert(1)>.weight",
    "</script><script>alert(1)</script>",
    "javascript:alert(1)",
    "a'\"`${alert(1)}{{7*7}}",
    "\u202egnp.exe",
    "../../../../etc/passwd",
    "%2e%2e%2fetc",
    "model.layers." + "9" * 60 + ".w",
    "x" * 1000,
    "emoji.\U0001f4a3.weight",
    "..",
    ".",
    "__proto__.constructor",
)


def hostile(folder: Path) -> None:
    """Keys, names, texts and numbers that an attacker would choose."""
    arrays = {key: np.array([np.nan, np.inf, -np.inf, 1e38], np.float32) for key in HOSTILE_KEYS}
    writer = {
        "holdfast": "<b>9.9</b>",
        "world": 2**62,
        "hosts": -1,
        "mesh": {"<svg onload=alert(1)>": 2**62, "__proto__": 0},
        "seconds": 1e299,
    }
    metrics = {"<b>loss</b>": 1e299, "__proto__": -1e299, "none": None}
    state = {
        "<script>alert(1)</script>": {
            "kind": "json",
            "value": {"\u2028": "\u0000\u001b[2J", "big": 2**300, "deep": _deep(60)},
        },
    }
    write_step(
        folder, 2**53 - 1, {"model": arrays}, writer=writer, metrics=metrics, state=state, created="<i>now</i>" * 10
    )


def _deep(levels: int) -> Any:
    return [] if not levels else [_deep(levels - 1)]


MAKERS: dict[str, Callable[[Path], None]] = {
    "branches": branches,
    "damaged": damaged,
    "hostile": hostile,
    "keys": keys,
    "many": many,
    "training": training,
}


def main() -> None:
    """Make the named roots, or all, each in a folder of its own."""
    top = Path(sys.argv[1]).absolute()
    for name in sys.argv[2:] or MAKERS:
        began = time.perf_counter()
        MAKERS[name](top / name)
        print(f"{top / name}  {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
