"""The torch.distributed.checkpoint sink: the plan of a folder that `dcp.load` can read; dcp_writer.py writes it.

Keys are those of a state {"model": ..., "optimizer": ...} from get_state_dict: `model.<key>`,
`optimizer.state.<parameter>.<name>`, `optimizer.param_groups.<n>.<option>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.sinks.base import Output, SinkContext, SinkRequest
from holdfast.convert.spans import TensorFile
from holdfast.core.names import natural_key
from holdfast.plan.contents import Contents
from holdfast.plan.files import FilePlan, Place, TensorSpec
from holdfast.plan.subclass_keys import SUBCLASSES

_PICKLE = "the metadata of torch DCP is a pickle: load it only from a trusted source"


def plan(contents: Contents, request: SinkRequest) -> Output:
    """Plan a folder of .distcp files, one per rank, written by torch's own writer."""
    unknown = sorted(name for name, entry in contents.state.items() if entry.get("mapped"))
    contents = replace(
        contents,
        groups={name: group for name, group in contents.groups.items() if name not in unknown},
        state={
            name: entry
            for name, entry in contents.state.items()
            if name not in unknown and entry.get("kind") != SUBCLASSES  # written as the tensors inside
        },
    )

    def prepare() -> None:
        import holdfast.convert.sinks.dcp_writer  # noqa: F401  (torch, which takes seconds)

    def write(context: SinkContext) -> None:
        from holdfast.convert.sinks.dcp_writer import write_folder

        write_folder(contents, context)

    def small_files(attempt: str, reports: Sequence[BlockReport]) -> Mapping[str, bytes]:
        return {}

    per_rank = [name for name, entry in contents.state.items() if not _is_single(entry)]
    notes = [_PICKLE]
    if per_rank:
        notes.append(f"omitted values that differ between ranks: {', '.join(sorted(per_rank))}")
    if unknown:
        notes.append(f"omitted {', '.join(unknown)}: the mapping changes keys, but its parameters are numbered")
    files = tuple(_described(name, contents) for name in contents.groups)
    return Output(files, small_files, tuple(notes), write, prepare)


def _is_single(entry: Any) -> bool:
    return "value" in entry or entry.get("kind") == "optimizer"


def _described(name: str, contents: Contents) -> TensorFile:
    """Describe a group as one file, for the summary."""
    group = contents.groups[name]
    places, position = [], 0
    keys = sorted(group.tensors, key=natural_key)
    for key in keys:
        spec = TensorSpec(key, group.tensors[key].dtype, group.tensors[key].shape)
        places.append(Place(spec, "__0_0.distcp", position))
        position += spec.bytes
    file = FilePlan("__0_0.distcp", 0, b"", position, tuple(places))
    return TensorFile(name, file, tuple(group.tensors[key] for key in keys))
