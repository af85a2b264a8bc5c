"""From a TOML file to a run: a config with an [embedding] section trains an embedding model, any other one text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.torch_needed import require_torch
from holdfast.train.config import RunConfig, read_tables
from holdfast.train.config_place import named_place
from holdfast.train.settings import build

if TYPE_CHECKING:
    from holdfast.train.embedding.trainer.embedding_config import EmbeddingConfig

KIND = "embedding"  # the section that makes a run one of an embedding model


def open_run(path: str | Path, sets: Iterable[str] = ()) -> RunConfig | EmbeddingConfig:
    """Read the config of a run, for `Trainer` or `EmbeddingTrainer`; "section.key=value" in `sets` override it.

    Raises NotFound, or InvalidArgument with the file, the line and a suggestion.
    """
    tables = read_tables(path, sets)
    if KIND not in tables:
        with named_place(path):
            return build(RunConfig, tables, "")
    require_torch("training an embedding model")
    from holdfast.train.embedding.trainer.embedding_config import parse_embedding_config

    with named_place(path):
        found = parse_embedding_config(tables)
        found.check_sizes()
    return found
