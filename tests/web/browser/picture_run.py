"""The run in the pictures of docs/page.md: a small model whose run was killed once and rewound once, saving now."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.retention import _save_policy
from holdfast.checkpoint.tags import add_tag
from holdfast.core.names import abandoned_folder
from holdfast.keep import parse
from holdfast.storage.local import LocalStorage
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import SaveStarted, WriterStatus
from tests.web import sample_runs

STEPS, EVERY, LAYERS, WORLD = 4000, 200, 16, 8
KILLED, RESUMED = 2640, 2600
REWOUND_FROM, REWOUND_TO = 3450, 3000
PARTS = {
    "self_attn.q_proj": (96, 96),
    "self_attn.k_proj": (48, 96),
    "self_attn.v_proj": (48, 96),
    "self_attn.o_proj": (96, 96),
    "mlp.gate_proj": (192, 96),
    "mlp.up_proj": (192, 96),
    "mlp.down_proj": (96, 192),
    "input_layernorm": (96,),
}


def make_picture_run(folder: Path) -> None:
    """Write the folder of a training run with its metrics, and its checkpoints."""
    root = folder / "checkpoints"
    root.mkdir(parents=True)
    (folder / "config.toml").write_text(sample_runs.CONFIG.format(folder="llama-small", steps=STEPS, every=EVERY))
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in _records())
    _steps(root)
    storage = LocalStorage(root)
    by_step = {entry.step: entry for entry in committed_steps(storage)}
    add_tag(storage, "best", by_step[2000])
    _save_policy(storage, parse("last(10) | every(1000)"))


def _began() -> float:
    return time.time() - 3 * 3600


def _at(step: int) -> float:
    return _began() + step * 2.6


def _records() -> list[dict[str, Any]]:
    """A loss that falls, with noise that repeats; a kill at one step and a rewind at another."""
    noise = np.random.default_rng(7)
    records: list[dict[str, Any]] = [{"event": "began", "step": 0, "at": _at(0), "layout": "fsdp 8"}]
    for start, end in ((0, KILLED), (RESUMED, REWOUND_FROM), (REWOUND_TO, STEPS + 60)):
        if start:
            records.append({"event": "resumed", "step": start, "at": _at(start), "layout": "fsdp 8"})
        for step in range(start + 5, end + 1, 5):
            loss = 2.05 + 6.5 * math.exp(-step / 620) + float(noise.normal()) * 0.05
            if start == RESUMED and step > 3200:
                loss += 0.004 * (step - 3200) ** 0.9  # it went astray: the reason to go back
            records.append({"step": step, "loss": loss, "lr": 3e-4 * 0.5 * (1 + math.cos(math.pi * step / STEPS))})
            if step % EVERY == 0:
                stall_ms = 4 + float(noise.random()) * 3
                records.append({"event": "save", "step": step, "at": _at(step), "stall_ms": stall_ms})
                records.append({"event": "published", "step": step, "at": _at(step) + 3, "seconds": 3.1})
    return records


def _steps(root: Path) -> None:
    kept = [1000, *(step for step in range(1800, STEPS + 1, EVERY))]
    for step in kept:
        _step(root, step, parent=REWOUND_TO if step == 3200 else step - EVERY)
    for step in (3200, 3400):
        _step(root, step, parent=step - EVERY, folder=abandoned_folder(step), attempt_of=0xA0 + step)
    manifest = root / "step-000000002400" / "holdfast.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":2400', b'"step":2401'))


def _step(root: Path, step: int, parent: int, folder: str | None = None, attempt_of: int = 0) -> None:
    created = datetime.fromtimestamp(_at(step), UTC).isoformat(timespec="seconds")
    writer = {
        "holdfast": "0.1.0", "world": WORLD, "hosts": 2, "mesh": {"dp": 4, "tp": 2},
        "seconds": 3.1 + 0.4 * math.sin(step) + (4.0 if step == 3600 else 0.0),
    }  # fmt: skip
    state = {"note": {"kind": "json", "value": {"tokens": step * 524288, "data": "shard-0017"}}}
    weights = _weights(step)
    sample_runs.write_step(
        root,
        step,
        {"model": weights, "optimizer": {f"{key}/exp_avg": value * 0.01 for key, value in weights.items()}},
        parent=parent,
        folder=folder,
        writer=writer,
        state=state,
        created=created,
        metrics={"loss": 2.05 + 6.5 * math.exp(-step / 620)},
        max_shard_bytes=2 * 10**6,
    )


def _weights(step: int) -> dict[str, np.ndarray]:
    """Weights that drift with the steps, some layers and parts more than others."""
    start, drift = np.random.default_rng(0), np.random.default_rng(1)
    found = {"model.embed_tokens.weight": start.normal(size=(512, 96)).astype(np.float32)}
    for layer in range(LAYERS):
        for place, (part, shape) in enumerate(PARTS.items()):
            depth = 0.2 + abs(math.sin(layer / 3)) + (2.0 if layer in (3, 11) else 0.0)
            strength = 0.0 if part == "input_layernorm" and layer % 3 else 2e-5 * depth * (1 + place % 3)
            value = start.normal(size=shape) * 0.05 + drift.normal(size=shape) * strength * (step / EVERY) * 0.05
            found[f"model.layers.{layer}.{part}.weight"] = value.astype(np.float32)
    found["model.norm.weight"] = np.ones(96, np.float32)
    head = start.normal(size=(512, 96)) + drift.normal(size=(512, 96)) * 1e-7 * step
    found["lm_head.weight"] = head.astype(np.float32)
    return found


@contextmanager
def save_in_flight(folder: Path) -> Iterator[None]:
    """Post what the writers of eight ranks post in a save; rank 5's is heard of no more."""
    mailbox = Mailbox(LocalStorage(folder / "checkpoints"), f".attempt-{0xF1:016x}")
    mailbox.make()
    mailbox.post_host("node-0")
    each = 640_000
    mailbox.post_begun(SaveStarted(STEPS + EVERY, WORLD, each * WORLD))
    ended = threading.Event()

    def beat() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            for rank in range(WORLD):
                if rank != 5 or number == 1:
                    share = 0.12 if rank == 5 else 0.62 + 0.05 * (rank % 4)
                    mailbox.post_status(rank, WriterStatus(number, "writing", int(each * share), each))
            ended.wait(0.5)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        mailbox.discard()
