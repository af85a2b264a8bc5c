"""A small save of two ranks on two hosts, as values: its plan, jobs, commit and filled arenas.

Rank 0 holds four columns of a matrix and rank 1 the other two, so every block has strided copies and bytes of
the other host.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.checkpoint.commit import Commit, FileFacts
from holdfast.checkpoint.shared_memory import Arena, seal
from holdfast.format.dtypes import dtype_named
from holdfast.format.manifest import GroupRecord
from holdfast.layout.box import Box
from holdfast.layout.placement import Mesh
from holdfast.plan.coverage import Holding, cells_of
from holdfast.plan.files import TensorSpec, bytes_of, part_of, split_group
from holdfast.plan.save_plan import SavePlan, plan_save
from holdfast.plan.writer_job import ArenaLayout, WriterJob, writer_job

PLAN, ATTEMPT, FOLDER, BLOCK_BYTES = "plan-1", ".attempt-0123456789abcdef", "step-000000000003", 128
SHAPE = (8, 6)
HELD = (Box((0, 0), (8, 4)), Box((0, 4), (8, 2)))
MATRIX = np.arange(48, dtype="<f4").reshape(SHAPE)


def save_plan(hosts: tuple[int, ...] = (0, 1)) -> SavePlan:
    holding = Holding(tuple(cells_of(SHAPE, HELD, "w")), (0, 1), HELD)
    files = split_group("model", [TensorSpec("w", dtype_named("float32"), SHAPE)], 1 << 40)
    return plan_save(files, lambda place: holding, list(hosts), BLOCK_BYTES)


def job(rank: int, hosts: tuple[int, ...] = (0, 1)) -> WriterJob:
    plan = save_plan(hosts)
    neighbors = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return writer_job(plan, PLAN, rank, {other: ArenaLayout(plan, other) for other in neighbors})


def commit(hosts: tuple[int, ...] = (0, 1)) -> Commit:
    files = save_plan(hosts).files
    names = tuple(file.name for file in files)
    return Commit(
        block_bytes=BLOCK_BYTES,
        files=tuple(map(FileFacts.of, files)),
        groups={"model": GroupRecord("module", names, MATRIX.nbytes, {}, {})},
        keys={"model": {"w": names[0]}},
        axes={},
        mesh=Mesh(("dp",), (2,), (0, 1)),
        world=2,
        hosts=len(set(hosts)),
        first_replica=(),
    )


def fill_arena(path: Path, rank: int, hosts: tuple[int, ...] = (0, 1), attempt: str = ATTEMPT) -> None:
    """Create a rank's arena with the rank's columns, sealed for the attempt."""
    layout = ArenaLayout(save_plan(hosts), rank)
    path.touch(0o600)
    with path.open("wb") as file:
        file.truncate(layout.size)
    memory = Arena(str(path), layout.size).bytes
    for span in layout.spans:
        shard = np.ascontiguousarray(part_of(MATRIX, span.held, Box.full(SHAPE)))
        data = bytes_of(shard)[span.begin * 4 : span.end * 4]
        memory[span.offset : span.offset + span.bytes] = np.frombuffer(data, dtype=np.uint8)
    seal(memory, attempt)


def file_bytes() -> bytes:
    """Return the bytes of the file that a save writes, whatever the hosts."""
    (file,) = save_plan().files
    return file.header + MATRIX.tobytes()
