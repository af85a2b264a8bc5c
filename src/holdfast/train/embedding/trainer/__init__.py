"""The run of an embedding model: its config, and `EmbeddingTrainer`, which trains, evaluates, saves and resumes."""

from holdfast.train.embedding.trainer.embedding_config import EmbeddingConfig, parse_embedding_config
from holdfast.train.embedding.trainer.embedding_trainer import EmbeddingTrainer

__all__ = ["EmbeddingConfig", "EmbeddingTrainer", "parse_embedding_config"]
