"""Losses of embeddings for `GradCache`: each returns this rank's share of the loss of the whole batch."""

from holdfast.train.embedding.losses.cosent import CoSENT
from holdfast.train.embedding.losses.distillation import KLDistillation, MarginMSE
from holdfast.train.embedding.losses.false_negatives import FalseNegatives
from holdfast.train.embedding.losses.info_nce import InfoNCE
from holdfast.train.embedding.losses.matryoshka import Matryoshka

__all__ = ["CoSENT", "FalseNegatives", "InfoNCE", "KLDistillation", "MarginMSE", "Matryoshka"]
