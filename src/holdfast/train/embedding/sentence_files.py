"""The files that make a checkpoint a folder of sentence-transformers: modules, pooling, prompts, lengths."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from holdfast.train.embedding.embedding_settings import EmbeddingSettings
from holdfast.version import __version__

MODULES, SENTENCES, TRANSFORMER = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
# The names of classes and of pooling's settings that every version of sentence-transformers reads.
CLASSES = "sentence_transformers.models."
POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def sentence_files(settings: EmbeddingSettings, width: int) -> dict[str, bytes]:
    """Return the files of sentence-transformers by name, for a model with vectors of `width` numbers."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] if settings.normalize else []
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": CLASSES + kind}
        for number, (path, kind) in enumerate(modules)
    ]
    files: dict[str, Any] = {
        MODULES: listed,
        SENTENCES: _sentence_config(settings),
        TRANSFORMER: {"max_seq_length": settings.max_length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": width,
            **{flag: mode == settings.pooling for mode, flag in POOLING_FLAGS.items()},
            "include_prompt": settings.include_prompt,
        },
    }
    if settings.normalize:
        files["2_Normalize/config.json"] = {}
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in files.items()}


def _sentence_config(settings: EmbeddingSettings) -> dict[str, Any]:
    sides = {name: settings.prompt(name) for name in ("query", "document")}  # as encode_query and encode_document do
    config: dict[str, Any] = {
        "model_type": "SentenceTransformer",
        "__version__": {"holdfast": __version__},
        "prompts": {**sides, **settings.prompts},
        "default_prompt_name": settings.default_prompt,
        "similarity_fn_name": settings.similarity,
    }
    return config if settings.truncate_dim is None else {**config, "truncate_dim": settings.truncate_dim}


def tokenizer_files(tokenizer: Any, *, padding_side: str | None = None) -> dict[str, bytes]:
    """Return the files of a tokenizer of transformers by name; `padding_side` is recorded in place of its own."""
    side = tokenizer.padding_side
    with tempfile.TemporaryDirectory(prefix="holdfast-tokenizer-") as folder:
        try:
            tokenizer.padding_side = padding_side or side
            tokenizer.save_pretrained(folder)
        finally:
            tokenizer.padding_side = side
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
