"""The Paddle sink: a unified checkpoint for PaddleFormers; which keys are Linear weights, stored [in, out].

Models use Hugging Face's order of Linear weights, [out, in]. Masters and moments use the order of
Paddle's own layers, [in, out].
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.sinks.base import Output, SinkRequest, omitted_names, tensor_files
from holdfast.convert.spans import TensorFile
from holdfast.core import names
from holdfast.core.errors import NotFound, Unsupported
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import FilePlan, Place, TensorSpec, split_group
from holdfast.plan.recipe import Recipe
from holdfast.sources.paddle.optimizer_names import is_moment, is_paddle_state

_MODEL, _MASTERS, _OPTIMIZER = "model", "master_weights", "optimizer"
_LINEAR = re.compile(
    r"(?:.*\.)?"
    r"(?:\w*_proj|kv_a_proj_with_mqa|in_proj_(?:ba|qkvz)|mtp_linear_proj\.\d+|proj|qkv"
    r"|gate|shared_expert_gate|fc\d+|linear_\d+|linear_fc\d+|merger\.mlp\.\d+)\.weight"
)  # all weights that PaddleFormers transposes in any of its models
_FROM_HIDDEN = re.compile(r".*\.(?:[qkv]_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|up_gate_proj)\.weight")
_TO_HIDDEN = re.compile(r".*\.(?:o_proj|down_proj)\.weight")

Tensors = dict[str, Recipe[Place]]


def plan(contents: Contents, request: SinkRequest) -> Output:
    """Plan the files of the model, its masters and its optimizer, with an index for each group."""
    model = _module(contents)
    if contents.groups[model].logical:
        key, dtype = next(iter(contents.groups[model].logical.items()))
        raise Unsupported(f"{model}: a Paddle checkpoint cannot store {key!r} as {dtype}; exclude it with --remove")
    tensors = _in_paddle_layout(contents, model)
    small = {file: data for file, data in request.side_files.items() if "/" not in file}
    files: list[TensorFile] = []
    for group, own in tensors.items():
        specs = [TensorSpec(key, recipe.dtype, recipe.shape) for key, recipe in own.items()]
        planned = split_group(group, specs, request.max_shard_bytes)
        files += tensor_files(group, planned, own)
        extra = {"master_weights": _MASTERS in tensors} if group == _OPTIMIZER else {}
        small[names.index_file(group)] = _index(planned, sum(spec.bytes for spec in specs), extra)
    if contents.step is not None:
        small["trainer_state.json"] = json.dumps({"global_step": contents.step}).encode() + b"\n"

    def small_files(attempt: str, reports: Sequence[BlockReport]) -> Mapping[str, bytes]:
        return small

    return Output(tuple(files), small_files, tuple(_notes(contents, model, tensors)))


def _module(contents: Contents) -> str:
    """Return the module to write: "model", or the only module."""
    modules = [name for name, group in contents.groups.items() if group.kind == "module"]
    if _MODEL in modules:
        return _MODEL
    if len(modules) != 1:
        actual = f"several modules: {', '.join(sorted(modules))}" if modules else "no module"
        raise NotFound(f"a Paddle checkpoint stores one model, not {actual}; choose one with --only GROUP")
    return modules[0]


def _in_paddle_layout(contents: Contents, model: str) -> dict[str, Tensors]:
    """Return the tensors of each group to write, in the layout that Paddle expects."""
    weights = dict(contents.groups[model].tensors)
    linear = {key for key, recipe in weights.items() if len(recipe.shape) == 2 and is_linear(key)}
    transpose_model = is_paddle_layout({key: recipe.shape for key, recipe in weights.items()})
    out: dict[str, Tensors] = {
        _MODEL: {key: _transpose_if(recipe, transpose_model and key in linear) for key, recipe in weights.items()}
    }
    for group in contents.groups.values():
        if group.kind == "masters" and set(group.tensors) <= weights.keys():
            out[_MASTERS] = {
                key: _transpose_if(recipe, not transpose_model and key in linear)
                for key, recipe in group.tensors.items()
            }
    states = _states(contents)
    if states:
        out[_OPTIMIZER] = {
            key: _transpose_if(recipe, not transpose_model and is_moment(key) and key.rpartition("/")[0] in linear)
            for key, recipe in states.items()
        }
    return out


def _states(contents: Contents) -> Tensors:
    """Return the optimizer states that Paddle supports. Other optimizers are omitted."""
    group = contents.groups.get(_OPTIMIZER) or next(_optimizers(contents), None)
    numbered = any(entry.get("numbered") for entry in contents.state.values())
    if group is None or group.kind != "optimizer" or numbered:  # Paddle identifies states only by key
        return {}
    return {key: recipe for key, recipe in group.tensors.items() if is_paddle_state(key)}


def _optimizers(contents: Contents) -> Any:
    return (group for group in contents.groups.values() if group.kind == "optimizer")


def _transpose_if(recipe: Recipe[Place], condition: bool) -> Recipe[Place]:
    return recipe.transposed() if condition and len(recipe.shape) == 2 else recipe


def is_linear(key: str) -> bool:
    """Return True if a key is the weight of a Linear layer, which Paddle stores as [in, out]."""
    return "lora" not in key and _LINEAR.fullmatch(key) is not None


def is_paddle_layout(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True if a model's Linear weights are [in, out]; False if unknown."""
    return infer_layout(shapes) is True


def infer_layout(shapes: Mapping[str, tuple[int, ...]]) -> bool | None:
    """Infer from the width of the embedding whether Linear weights are [in, out]; None if unknown."""
    widths = {shape[1] for key, shape in shapes.items() if key.endswith("embed_tokens.weight") and len(shape) == 2}
    votes = {True: 0, False: 0}
    for key, shape in shapes.items():
        if len(shape) != 2 or shape[0] == shape[1] or not is_linear(key):
            continue
        inputs_first = shape[0] in widths if _FROM_HIDDEN.fullmatch(key) else shape[1] in widths
        outputs_first = shape[1] in widths if _FROM_HIDDEN.fullmatch(key) else shape[0] in widths
        if (_FROM_HIDDEN.fullmatch(key) or _TO_HIDDEN.fullmatch(key)) and inputs_first != outputs_first:
            votes[inputs_first] += 1
    return None if votes[True] == votes[False] else votes[True] > votes[False]


def _index(planned: Sequence[FilePlan], total: int, extra: Mapping[str, Any]) -> bytes:
    weight_map = {place.spec.key: file.name for file in planned for place in file.places}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map, **extra}
    return json.dumps(index, indent=4, ensure_ascii=False).encode() + b"\n"


def _notes(contents: Contents, model: str, tensors: Mapping[str, Tensors]) -> list[str]:
    """Return notes about contents that the format cannot store."""
    written = {model, _OPTIMIZER}
    if _MASTERS in tensors:
        written |= {name for name, group in contents.groups.items() if group.kind == "masters"}
    others = omitted_names(contents, written)
    notes = [f"a Paddle checkpoint stores a model and its optimizer: omitted {', '.join(others)}"] if others else []
    group: Group | None = contents.groups.get(_OPTIMIZER)
    omitted = sorted({key.rpartition("/")[2] for key in group.tensors if not is_paddle_state(key)}) if group else []
    if omitted:
        notes.append(f"omitted optimizer states that Paddle does not support: {', '.join(omitted)}")
    if _OPTIMIZER in tensors:
        notes.append("a Paddle checkpoint does not store the options of the optimizer, such as its learning rate")
    if group is not None and _OPTIMIZER not in tensors:
        notes.append("omitted the optimizer: Paddle supports none of its states")
    return notes
