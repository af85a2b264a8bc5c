"""The [data] and [evaluation] settings of an embedding run: files of rows, their weights, held-out sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.data import EmbeddingData, RowFields, TextSet
from holdfast.train.embedding.evaluation import RetrievalSet, SimilaritySet
from holdfast.train.settings import refuse_unknown

HeldOut = RetrievalSet | SimilaritySet


@dataclass(frozen=True, slots=True)
class TextSetConfig:
    """A set of training rows, the arguments of `TextSet`. `fields` are names of fields that are not the usual ones."""

    files: tuple[str, ...]
    name: str = ""
    weight: float | None = None
    negatives: int | None = None
    duplicates: str = "put off"
    fields: Mapping[str, str] = field(default_factory=dict)

    def open(self) -> TextSet:
        """Return the set; its files are read by `EmbeddingData`."""
        duplicates: Any = self.duplicates
        return TextSet(
            self.files, self.name, self.weight, self.negatives, duplicates, row_fields(self.fields, "data.sets.fields")
        )


@dataclass(frozen=True, slots=True)
class EmbeddingDataConfig:
    """The rows to train on. `tokenizer` is a folder with a tokenizer; without it that of train.start_from is used.

    `made_by` is a command that writes the files; an error about a missing one names it.
    """

    sets: tuple[TextSetConfig, ...]
    tokenizer: str = ""
    seed: int = 1
    made_by: str = ""

    @property
    def files(self) -> list[str]:
        """The files of all sets."""
        return [path for each in self.sets for path in each.files]

    def open(self, global_batch: int) -> EmbeddingData:
        """Read and check every row of every file."""
        return EmbeddingData([each.open() for each in self.sets], global_batch=global_batch, seed=self.seed)


@dataclass(frozen=True, slots=True)
class HeldOutConfig:
    """A held-out set: `rows`, a file as for training, or for retrieval the files `queries`, `documents`, `relevant`.

    `kind` is "retrieval" (nDCG@10, MRR@10, recall) or "similarity" (Spearman's correlation with the rows' labels).
    """

    name: str
    kind: str = "retrieval"
    rows: str = ""
    queries: str = ""
    documents: str = ""
    relevant: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in ("retrieval", "similarity"):
            raise InvalidArgument(f"evaluation.sets {self.name}: kind={self.kind!r}: choose retrieval or similarity")
        three = (self.queries, self.documents, self.relevant)
        if (self.kind == "similarity" or not all(three)) and (any(three) or not self.rows):
            other = "" if self.kind == "similarity" else ", or queries, documents and relevant"
            raise InvalidArgument(f"evaluation.sets {self.name}: give rows{other}")
        if self.rows and any(three):
            raise InvalidArgument(f"evaluation.sets {self.name}: give rows, or queries, documents and relevant")

    def open(self) -> HeldOut:
        """Read the set."""
        if self.kind == "similarity":
            return SimilaritySet.read(self.rows, row_fields(self.fields, "evaluation.sets.fields"))
        if self.rows:
            return RetrievalSet.from_rows(self.rows, row_fields(self.fields, "evaluation.sets.fields"))
        return RetrievalSet.read(self.queries, self.documents, self.relevant)


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Held-out sets, evaluated every `train.evaluate_every` steps; `batch` texts are encoded at once."""

    sets: tuple[HeldOutConfig, ...] = ()
    batch: int = 64
    recall_at: tuple[int, ...] = (1, 10)

    def __post_init__(self) -> None:
        names = [each.name for each in self.sets]
        if len(set(names)) < len(names):
            raise InvalidArgument(f"evaluation.sets are named {names}: give each a name of its own")
        if self.batch < 1 or not self.recall_at or min(self.recall_at) < 1:
            raise InvalidArgument("evaluation.batch and every number of evaluation.recall_at must be at least 1")

    @property
    def files(self) -> list[str]:
        """The files of all sets."""
        named = [(each.rows, each.queries, each.documents, each.relevant) for each in self.sets]
        return [path for paths in named for path in paths if path]

    def open(self) -> dict[str, HeldOut]:
        """Read all sets, by name."""
        return {each.name: each.open() for each in self.sets}


def row_fields(names: Mapping[str, str], where: str) -> RowFields:
    """Return the names of the fields of a file."""
    known = ("query", "positive", "negatives", "label", "scores")
    refuse_unknown(names, known, where)
    return RowFields(**names)
