"""Training of text embedding models: losses over batches that no device holds at once (`GradCache`)."""

from holdfast.train.embedding.columns import Columns
from holdfast.train.embedding.grad_cache import GradCache
from holdfast.train.embedding.replica_encoder import ReplicaEncoder

__all__ = ["Columns", "GradCache", "ReplicaEncoder"]
