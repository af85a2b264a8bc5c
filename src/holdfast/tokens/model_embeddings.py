"""The tensors of a live model with a row for each token: input and output embeddings, biases, ties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.adapters.module import unwrap
from holdfast.core.errors import InvalidArgument, Unsupported

_INPUTS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "shared")
_OUTPUTS = ("lm_head", "embed_out", "output", "output_layer")


@dataclass(frozen=True, slots=True)
class VocabularyTensor:
    """A parameter or buffer with a row for each token, and every place of the model where it is registered."""

    tensor: torch.Tensor
    places: tuple[tuple[str, nn.Module, str], ...]  # path, module, name

    @property
    def key(self) -> str:
        path, _, name = self.places[0]
        return f"{path}.{name}" if path else name


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of a model: its number of rows, and the tensors that have them."""

    model: nn.Module
    rows: int
    tensors: tuple[VocabularyTensor, ...]
    modules: tuple[nn.Module, ...]  # the embeddings and heads, whose attributes name the number of rows


def find_vocabulary(model: nn.Module) -> Vocabulary:
    """Find the input and output embeddings of a model, or of a pipeline stage that has one of them.

    Models of transformers name them; otherwise they are found by the usual names.
    """
    inner = unwrap(model)
    modules = list(dict.fromkeys([*_of_transformers(inner)] or [*_by_names(inner)]))
    if not modules:
        raise Unsupported(
            f"{type(inner).__name__} has no embedding of tokens that could be found: neither get_input_embeddings nor "
            f"a module named {', '.join(_INPUTS)}"
        )
    sizes = {_weight(module).shape[0] for module in modules}
    if len(sizes) != 1:
        raise Unsupported(f"the embeddings of {type(inner).__name__} have different numbers of rows: {sorted(sizes)}")
    rows = sizes.pop()
    tensors: list[VocabularyTensor] = []
    for module in modules:
        for tensor in _row_tensors(module, rows):
            if all(tensor is not known.tensor for known in tensors):
                tensors.append(VocabularyTensor(tensor, tuple(_places(inner, tensor))))
    _refuse_others(inner, rows, modules, tensors)
    return Vocabulary(inner, rows, tuple(tensors), tuple(modules))


def _of_transformers(model: Any) -> Iterator[nn.Module]:
    for name in ("get_input_embeddings", "get_output_embeddings"):
        get = getattr(model, name, None)
        module = get() if callable(get) else None
        if isinstance(module, nn.Module):
            yield module


def _by_names(model: nn.Module) -> Iterator[nn.Module]:
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if (isinstance(module, nn.Embedding) and name in _INPUTS) or (
            isinstance(module, nn.Linear) and name in _OUTPUTS
        ):
            yield module


def _weight(module: nn.Module) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise Unsupported(f"{type(module).__name__}, an embedding of tokens, has no matrix named weight")
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise Unsupported(f"{type(module).__name__}: tokens cannot be added to quantized embeddings ({weight.dtype})")
    return weight


def _row_tensors(module: nn.Module, rows: int) -> Iterator[torch.Tensor]:
    """Yield the weight of an embedding, and other tensors of it with a value for each row, such as a bias."""
    yield _weight(module)
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if name != "weight" and tensor.dim() == 1 and tensor.shape[0] == rows:
            yield tensor


def _places(model: nn.Module, tensor: torch.Tensor) -> Iterator[tuple[str, nn.Module, str]]:
    for path, module in model.named_modules():
        for registered in (module._parameters, module._buffers):
            for name, other in registered.items():
                if other is tensor:
                    yield path, module, name


def _refuse_others(
    model: nn.Module, rows: int, modules: Sequence[nn.Module], tensors: Sequence[VocabularyTensor]
) -> None:
    """Raise for a further table of tokens: a model that looks new tokens up in it would fail."""
    known = {id(each.tensor) for each in tensors}
    for path, module in model.named_modules():
        table = isinstance(module, nn.Embedding) and module.num_embeddings == rows and module not in modules
        if table and id(module.weight) not in known:
            raise Unsupported(
                f"{path}.weight has {rows} rows, as many as the vocabulary, but is neither the input nor the output "
                "embedding: tokens cannot be added to this model"
            )
    final = getattr(model, "final_logits_bias", None)
    if isinstance(final, torch.Tensor) and final.shape[-1] == rows:
        raise InvalidArgument("models with final_logits_bias have logits of their own: tokens cannot be added to them")
