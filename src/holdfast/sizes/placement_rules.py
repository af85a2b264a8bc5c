"""Rules that place the tensors of a model on the axes of a run: pipeline stage, tensor-parallel dim, expert."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument
from holdfast.sizes.model_tensors import ModelTensor
from holdfast.sizes.run_shape import RunShape

# The outermost number: encoder.block.3.layer.1 is in layer 3.
_LAYER = re.compile(r"(?P<stack>(?:.*?\.)?(?:layers|h|blocks|block|layer))\.(?P<number>\d+)\.")
_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<number>\d+)\.")
_STACKED_EXPERTS = re.compile(r".*\.experts\.[A-Za-z_]+(?:\.weight)?")
_FIRST = re.compile(r"(?:.*\.)?(?:embed_tokens|word_embeddings|wte|wpe|embed_in|embeddings?|embed_positions)\.")
# What comes before the layers of a composite model, beside its other stacks; and what comes after all layers.
_BEFORE = re.compile(r"(?:.*\.)?(?:multi_modal_projector|mm_projector|visual|(?:vision|audio)_\w+)\.")
_AFTER = re.compile(r"(?:.*\.)?mtp\.")
# The usual split of projections: the outputs of the first of two, the inputs of the second.
_OUTPUTS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "qkv", "query_key_value", "query", "key", "value", "q_b_proj"),
    *("kv_b_proj", "gate_proj", "up_proj", "gate_up_proj", "in_proj", "fc1", "w1", "w3", "wq", "wk", "wv"),
    *("q", "k", "v", "wi", "wi_0", "wi_1", "fc_in", "linear_fc1", "shared"),
    *("dense_h_to_4h", "lm_head", "embed_tokens", "word_embeddings", "wte", "embed_in", "embed_out"),
)
_INPUTS = ("o_proj", "down_proj", "out_proj", "fc2", "w2", "o", "wo", "fc_out", "linear_fc2", "dense_4h_to_h")
_PACKED = frozenset({"qweight", "qzeros", "scales"})  # GPTQ and AWQ: [in, out]
_TRANSPOSED = {"c_attn": 1, "c_fc": 1, "c_proj": 0}  # GPT-2's Conv1D: [in, out]
_NOT_COMPUTED = re.compile(r"(?:.*\.)?(?:lm_head|embed[a-z_]*|word_embeddings|wte|wpe|router|gate|norm[a-z0-9_]*)\.")
_ALIGNED = 16  # the sizes of a product in fp8


@dataclass(frozen=True, slots=True)
class TensorRole:
    """Where a tensor belongs: its pipeline stages, the dim that tensor parallelism splits, the owner of an expert.

    Stacked experts are dealt to all owners along their first dim.
    """

    stages: tuple[int, ...]
    tensor_dim: int | None = None
    expert_owner: int | None = None
    is_stacked: bool = False

    @property
    def is_split(self) -> bool:
        return self.tensor_dim is not None or self.expert_owner is not None or self.is_stacked


class PlacementRules:
    """Roles of the tensors of one model, by their keys."""

    def __init__(self, tensors: Sequence[ModelTensor], aliases: Mapping[str, str], shape: RunShape) -> None:
        self._shape = shape
        stacks: Counter[str] = Counter()
        for tensor in tensors:
            if match := _LAYER.match(tensor.key):
                stacks[match["stack"]] += math.prod(tensor.shape)
        self._stack = stacks.most_common(1)[0][0] if stacks else None
        parents = {stack.rpartition(".")[0] + "." for stack in stacks if "." in stack and not _AFTER.match(f"{stack}.")}
        self._before = tuple(parent for parent in parents if not f"{self._stack}.".startswith(parent))
        self._layers = 1 + max((self._layer(tensor.key) or 0 for tensor in tensors), default=0)
        self._experts: Counter[str] = Counter()
        for tensor in tensors:
            if match := _EXPERT.match(tensor.key):
                self._experts[match["layer"]] = max(self._experts[match["layer"]], int(match["number"]) + 1)
        self._tied: dict[str, list[str]] = {}
        for alias, key in aliases.items():
            self._tied.setdefault(key, []).append(alias)
        if shape.pp > 1 and self._layers < shape.pp:
            raise InvalidArgument(f"{self._layers} layers are too few for pp={shape.pp}")
        has_experts = any(_EXPERT.match(tensor.key) or _STACKED_EXPERTS.fullmatch(tensor.key) for tensor in tensors)
        if shape.ep > 1 and not has_experts:
            raise InvalidArgument(f"ep={shape.ep}, but the model has no experts")

    def role(self, tensor: ModelTensor) -> TensorRole:
        """Return the role of a tensor. Every stage has the buffers that are outside of layers."""
        if not tensor.is_parameter and not _LAYER.match(tensor.key):
            return TensorRole(tuple(range(self._shape.pp)))
        stages = tuple(sorted({self._stage(key) for key in (tensor.key, *self._tied.get(tensor.key, ()))}))
        expert = _EXPERT.match(tensor.key)
        if expert is not None:
            return TensorRole(stages, expert_owner=self._owner(expert["layer"], int(expert["number"])))
        if _STACKED_EXPERTS.fullmatch(tensor.key) and tensor.shape:
            self._check_experts(tensor.key, tensor.shape[0])
            return TensorRole(stages, is_stacked=True)
        return TensorRole(stages, tensor_dim=self._tensor_dim(tensor))

    def is_computed(self, tensor: ModelTensor) -> bool:
        """Return True if a layer multiplies with this weight, so that computing in fp8 takes a copy of it."""
        if len(tensor.shape) < 2 or not tensor.is_float or not tensor.is_parameter:
            return False
        return not _NOT_COMPUTED.match(tensor.key) and all(size % _ALIGNED == 0 for size in tensor.shape[-2:])

    def unsplit(self, tensors: Sequence[ModelTensor]) -> list[str]:
        """Return the matrices that every tensor-parallel rank holds whole, because no rule splits them."""
        return [tensor.key for tensor in tensors if len(tensor.shape) > 1 and not self.role(tensor).is_split]

    def _layer(self, key: str) -> int | None:
        match = _LAYER.match(key)
        return int(match["number"]) if match is not None and match["stack"] == self._stack else None

    def _stage(self, key: str) -> int:
        layer, stages = self._layer(key), self._shape.pp
        if layer is not None:  # layers are distributed as evenly as possible
            return next(s for s in range(stages) if layer < (s + 1) * self._layers // stages)
        if _AFTER.match(key):
            return stages - 1
        is_before = _FIRST.match(key) or _LAYER.match(key) or _BEFORE.match(key) or key.startswith(self._before)
        return 0 if is_before else stages - 1

    def _owner(self, layer: str, number: int) -> int:
        experts = self._experts[layer]
        self._check_experts(layer, experts)
        return number * self._shape.expert_ranks // experts

    def _check_experts(self, where: str, experts: int) -> None:
        if experts % self._shape.expert_ranks:
            owners = self._shape.expert_ranks
            raise InvalidArgument(f"{where}: {experts} experts cannot be dealt to {owners} ranks (ep x tp)")

    def _tensor_dim(self, tensor: ModelTensor) -> int | None:
        if self._shape.tp == 1 or not tensor.shape:
            return None
        *_, layer, name = ["", "", *tensor.key.split(".")]
        dim = _split_dim(layer, is_matrix=len(tensor.shape) == 2)
        if dim is not None and name in _PACKED and len(tensor.shape) == 2:
            dim = 1 - dim
        return None if dim is None or tensor.shape[dim] == 1 else dim  # a single scale is that of all ranks


def _split_dim(layer: str, *, is_matrix: bool) -> int | None:
    """Return the dim that tensor parallelism splits of a layer's weight, or of its bias."""
    if layer in _TRANSPOSED:
        splits_outputs = _TRANSPOSED[layer] == 1
        return _TRANSPOSED[layer] if is_matrix else (0 if splits_outputs else None)
    if layer in _OUTPUTS:
        return 0
    return 1 if layer in _INPUTS and is_matrix else None
