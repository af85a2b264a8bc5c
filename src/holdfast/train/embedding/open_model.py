"""Opening an embedding model: a folder of the hub, of sentence-transformers, or a saved step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from holdfast.api import load, open_checkpoint
from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.train.embedding.embedding_model import EmbeddingModel
from holdfast.train.embedding.embedding_settings import EmbeddingSettings
from holdfast.train.embedding.sentence_folder import read_sentence_folder
from holdfast.train.models.decoder import Decoder
from holdfast.train.models.model_config import FAMILIES, ModelConfig

_PREFIX, _HEAD = "model.", "lm_head.weight"
_POOLER = "pooler."  # what encoders compute from the first token for other tasks
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # no code of a folder runs


def open_embedding_model(
    folder: str | Path,
    settings: EmbeddingSettings | None = None,
    *,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    **changes: Any,
) -> EmbeddingModel:
    """Open a model to train or to encode with: Llama, Qwen2 and Qwen3 as decoders of the trainer, others as they are.

    Args:
        folder: A folder with config.json, tensors and tokenizer, as the hub has them, with the names of the model
            or of its body; or a folder of sentence-transformers, such as a step that was saved with `files`.
        settings: How vectors are made; by default what a folder of sentence-transformers says.
        device: Where the parameters are, in fp32.
        compute_dtype: The dtype of a decoder's activations.
        recompute: Compute the activations of a decoder's blocks again for gradients.
        changes: Settings of a decoder that differ from config.json, such as `residual_dropout`.

    Raises NotFound if the folder or a file of it is missing, Unsupported for what would change its vectors.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotFound(f"{folder} is not a folder: download the model of the hub first")
    if settings is None:
        found = read_sentence_folder(folder)
        folder, settings = found.encoder, found.settings
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config()
    if config is None:
        raise NotFound(f"{folder} has no config.json, which says what model the tensors are of")
    if config.get("model_type") in FAMILIES:
        tokenizer = open_tokenizer(folder)
        model = ModelConfig.from_hf(config, **changes)
        decoder = _open_decoder(folder, model, checkpoint.keys("model"), device, compute_dtype, recompute)
        return EmbeddingModel(decoder, with_limit(settings, tokenizer, model.max_position_embeddings), tokenizer)
    options = {"recompute": recompute, "compute_dtype": compute_dtype != torch.float32}
    refused = [*changes, *(name for name, given in options.items() if given)]
    if refused:
        raise InvalidArgument(f"{', '.join(refused)}: only decoders of {', '.join(FAMILIES)} take this")
    tokenizer = open_tokenizer(folder)
    encoder = open_encoder(folder).to(device)
    encoder.config.use_cache = False
    positions = getattr(encoder.config, "max_position_embeddings", None)
    return EmbeddingModel(encoder, with_limit(settings, tokenizer, positions), tokenizer)


def open_encoder(folder: str | Path, config: Any = None) -> Any:
    """Open a model of transformers in fp32, with the config of the folder or another one.

    Parameters that vectors do not depend on, those of a pooler, are frozen: optimizers and DDP leave them alone.
    Raises InvalidArgument if transformers cannot open it or finds tensors missing, Unsupported for encoder-decoders.
    """
    transformers = import_transformers(Path(folder))
    changed = {} if config is None else {"config": config}
    try:
        model, found = transformers.AutoModel.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **changed, **LOCAL
        )
    except Exception as error:
        raise InvalidArgument(f"{folder}: transformers cannot open the model: {summary(error)}") from error
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{folder}: {model.config.model_type} is an encoder-decoder: its decoder needs inputs too")
    missing = sorted(key for key in found["missing_keys"] if not key.startswith(_POOLER))
    if missing:
        raise InvalidArgument(
            f"{folder}: {len(missing)} tensors of {type(model).__name__} are missing, such as {missing[0]}; expected "
            "those of the whole encoder"
        )
    for name, parameter in model.named_parameters():
        if name.startswith(_POOLER):
            parameter.requires_grad_(False)
    return model


def _open_decoder(
    folder: Path,
    config: ModelConfig,
    keys: list[str],
    device: torch.device | str,
    compute_dtype: torch.dtype,
    recompute: bool,
) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config, head=False, recompute=recompute, compute_dtype=compute_dtype)
    decoder = decoder.to_empty(device=device)
    load(folder, {"model": decoder.model}, mapping=body_mapping(decoder, keys), cast=True)
    return decoder


def body_mapping(decoder: Decoder, keys: list[str]) -> str | None:
    """Return the mapping to a decoder's body from the names of a whole model; None if the keys are the body's own."""
    if not any(key.startswith(_PREFIX) for key in keys):
        return None
    lines = [f"{_PREFIX}{key} -> {key}" for key in decoder.model.state_dict()]
    return "\n".join([*lines, f"{_HEAD} -> _"] if _HEAD in keys else lines)


def open_tokenizer(folder: Path) -> Any:
    """Open the tokenizer of a folder with transformers; nothing is downloaded.

    Raises NotFound if the folder is missing, InvalidArgument if transformers finds no tokenizer in it.
    """
    if not folder.is_dir():
        raise NotFound(f"{folder}: there is no such folder with a tokenizer")
    transformers = import_transformers(folder)
    try:
        found = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
    except Exception as error:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise InvalidArgument(
            f"{folder}: transformers cannot open a tokenizer here; expected tokenizer.json and tokenizer_config.json, "
            f"found {names}: {summary(error)}"
        ) from error
    if found.pad_token_id is None:
        raise InvalidArgument(
            f"{folder}: the tokenizer has no padding token, so texts cannot share a batch: set pad_token in "
            "tokenizer_config.json, to the eos_token if it has no other"
        )
    return found


def import_transformers(folder: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise Unsupported(
            f"{folder}: tokenizers and encoders need transformers, which is not installed: "
            f"pip install 'holdfast[transformers]' ({error})"
        ) from None
    return transformers


def summary(error: Exception) -> str:
    """Return the class of an error, and the beginning of its message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def with_limit(settings: EmbeddingSettings, tokenizer: Any, positions: int | None) -> EmbeddingSettings:
    """Return the settings with the tokenizer's or the model's limit of tokens, if they have none."""
    if settings.max_length is not None:
        return settings
    limits = [limit for limit in (tokenizer.model_max_length, positions) if isinstance(limit, int) and limit > 0]
    limit = min(limits, default=None)
    return settings if limit is None or limit > 2**31 else replace(settings, max_length=limit)
