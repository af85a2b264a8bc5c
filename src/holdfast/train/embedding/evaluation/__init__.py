"""Evaluation of embedding models on held-out files: retrieval (nDCG, recall, MRR) and similarity (Spearman)."""

from holdfast.train.embedding.evaluation.held_out import RetrievalSet, SimilaritySet
from holdfast.train.embedding.evaluation.retrieval import evaluate_retrieval
from holdfast.train.embedding.evaluation.spearman import evaluate_similarity

__all__ = ["RetrievalSet", "SimilaritySet", "evaluate_retrieval", "evaluate_similarity"]
