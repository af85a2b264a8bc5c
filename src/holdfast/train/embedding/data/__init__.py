"""Training data of embedding models: sets of texts from JSONL and parquet, in batches that every layout shares."""

from holdfast.train.embedding.data.embedding_data import EmbeddingData, TextBatch
from holdfast.train.embedding.data.text_row import RowFields
from holdfast.train.embedding.data.text_set import TextSet

__all__ = ["EmbeddingData", "RowFields", "TextBatch", "TextSet"]
