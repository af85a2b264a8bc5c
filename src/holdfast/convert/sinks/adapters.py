"""PEFT adapters in a Hugging Face folder: each one's adapter_model.safetensors and config, as PEFT opens them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.sinks.base import Output, SinkRequest, omitted_names, tensor_files
from holdfast.convert.spans import TensorFile
from holdfast.core import names
from holdfast.core.errors import Unsupported
from holdfast.plan.contents import Contents
from holdfast.plan.files import TensorSpec, split_group


def plan_adapters(contents: Contents, request: SinkRequest) -> Output:
    """Plan the files of every adapter; averages of adapters are left out, as any averages are."""
    chosen = {name: group for name, group in contents.groups.items() if group.kind == names.ADAPTER and "/" not in name}
    chosen = chosen or {name: group for name, group in contents.groups.items() if group.kind == names.ADAPTER}
    files: list[TensorFile] = []
    small: dict[str, bytes] = {}
    notes: list[str] = []
    for name, group in sorted(chosen.items()):
        if group.logical:
            key = sorted(group.logical)[0]
            raise Unsupported(f"{name}: an adapter cannot store {key!r} with the dtype {group.logical[key]}")
        specs = [TensorSpec(key, recipe.dtype, recipe.shape) for key, recipe in group.tensors.items()]
        files += tensor_files(name, split_group(name, specs, request.max_shard_bytes, group.kind), group.tensors)
        config = names.group_folder(names.file_stem(name, group.kind)) + names.ADAPTER_CONFIG
        if config not in request.side_files:
            notes.append(f"the source has no {config}: PeftModel.from_pretrained needs it in the folder")
    for name, data in request.side_files.items():
        folder = name.rpartition("/")[0]
        if not folder or name.endswith(f"/{names.ADAPTER_CONFIG}"):
            small[name] = data
    kept = {names.group_folder(file.plan.name) for file in files}
    small = {name: data for name, data in small.items() if names.group_folder(name) in kept | {""}}
    others = omitted_names(contents, list(chosen))
    if others:
        notes.insert(0, f"an adapter's folder stores only adapters: omitted {', '.join(others)}")

    def small_files(attempt: str, reports: Sequence[BlockReport]) -> Mapping[str, bytes]:
        return small

    return Output(tuple(files), small_files, tuple(notes))
