"""The sink of torch.distributed.checkpoint: a folder that `dcp.load` reads.

Keys are those of a state {"model": ..., "optimizer": ...} as get_state_dict gives it: `model.<key>`,
`optimizer.state.<parameter>.<name>`, `optimizer.param_groups.<n>.<option>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.sinks.base import Output, Request, Scene, TensorFile
from holdfast.format.names import natural_key
from holdfast.plan.contents import Contents
from holdfast.plan.files import FilePlan, Place, TensorSpec

_PICKLE = "the metadata of torch DCP is a pickle: whoever loads it trusts whoever wrote it"


def plan(contents: Contents, request: Request) -> Output:
    """A folder of .distcp files, one for each rank that converts, written by torch's own writer."""
    unknown = sorted(name for name, entry in contents.state.items() if entry.get("mapped"))
    contents = replace(
        contents,
        groups={name: group for name, group in contents.groups.items() if name not in unknown},
        state={name: entry for name, entry in contents.state.items() if name not in unknown},
    )

    def write(scene: Scene) -> None:
        from holdfast.convert.sinks.dcp_writer import write_folder

        write_folder(contents, scene)

    def small_files(attempt: str, reports: Sequence[BlockReport]) -> Mapping[str, bytes]:
        return {}

    left = [name for name, entry in contents.state.items() if not _is_single(entry)]
    notes = [_PICKLE]
    if left:
        notes.append(f"left out, since they differ between ranks: {', '.join(sorted(left))}")
    if unknown:
        notes.append(f"{', '.join(unknown)} left out: a mapping made other keys, and it has its parameters by number")
    files = tuple(_described(name, contents) for name in contents.groups)
    return Output(files, small_files, tuple(notes), write)


def _is_single(entry: Any) -> bool:
    return "value" in entry or entry.get("kind") == "optimizer"


def _described(name: str, contents: Contents) -> TensorFile:
    """A group as one file: what is told of it before it is written."""
    group = contents.groups[name]
    places, position = [], 0
    keys = sorted(group.tensors, key=natural_key)
    for key in keys:
        spec = TensorSpec(key, group.tensors[key].dtype, group.tensors[key].shape)
        places.append(Place(spec, "__0_0.distcp", position))
        position += spec.bytes
    file = FilePlan("__0_0.distcp", 0, b"", position, tuple(places))
    return TensorFile(name, file, tuple(group.tensors[key] for key in keys))
