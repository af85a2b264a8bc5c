"""What ranks do in the tests of object stores."""

from __future__ import annotations

import torch
import torch.distributed as dist

import holdfast
from holdfast.storage import shared_storage_at
from tests.dist.test_background import weights


def save_twice(root: str, dim: int) -> list[tuple[str, int]]:
    """Two saves in the background, the second by the standing plan; what this rank's writer wrote."""
    events: list[holdfast.Event] = []
    with holdfast.Checkpointer(root, block_bytes=16 * 4096, max_shard_size=400_000, on_event=events.append) as run:
        for step in (1, 2):
            run.save(step, state(dim, step)).result(60)
    return [(event.name, event.bytes) for event in events if event.name == "written"]


def save_once(root: str, dim: int) -> None:
    """One blocking save."""
    holdfast.save(f"{_above(root)}/once{_options(root)}", state(dim, 1), block_bytes=16 * 4096, max_shard_size=400_000)


def _above(root: str) -> str:
    return root.split("?", maxsplit=1)[0]


def _options(root: str) -> str:
    return f"?{root.split('?')[1]}" if "?" in root else ""


def state(dim: int, step: int) -> dict[str, object]:
    more = {f"m{number}": tensor * (number + step) for number, tensor in enumerate([weights(dim)["w"]] * 2)}
    return {"w": weights(dim), "more": more, "note": {"step": step}}


def restore(root: str, dim: int) -> int | None:
    """Restore the newest step into zeros and compare it with what was saved."""
    wanted = state(dim, 2)
    empty = {name: {key: torch.zeros_like(value) for key, value in wanted[name].items()} for name in ("w", "more")}  # type: ignore[attr-defined]
    found: dict[str, object] = {**empty, "note": {}}
    with holdfast.Checkpointer(root) as run:
        step = run.restore(found)
    for name in ("w", "more"):
        for key, value in wanted[name].items():  # type: ignore[attr-defined]
            assert torch.equal(found[name][key].to_local(), value.to_local()), (dist.get_rank(), name, key)
    assert found["note"] == {"step": 2}
    return step


def files_of(root: str, folder: str) -> dict[str, bytes]:
    """Everything in a folder but its manifest, which tells when and by whom it was written."""
    storage = shared_storage_at(root)
    return {name: storage.read(folder, name, 1 << 30) for name in storage.files(folder) if name != "holdfast.json"}
