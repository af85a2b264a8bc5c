"""Training of text embedding models: models that the hub opens, and losses over batches that no device holds at once.

`GradCache` computes the gradients of a whole batch, `EmbeddingModel` makes vectors of texts.
"""

from holdfast.train.embedding.columns import Columns
from holdfast.train.embedding.embedding_model import EmbeddingModel
from holdfast.train.embedding.embedding_settings import EmbeddingSettings
from holdfast.train.embedding.grad_cache import GradCache
from holdfast.train.embedding.open_model import open_embedding_model
from holdfast.train.embedding.replica_encoder import ReplicaEncoder
from holdfast.train.embedding.sentence_folder import read_sentence_folder

__all__ = [
    "Columns",
    "EmbeddingModel",
    "EmbeddingSettings",
    "GradCache",
    "ReplicaEncoder",
    "open_embedding_model",
    "read_sentence_folder",
]
