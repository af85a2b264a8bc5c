"""Held-out sets from JSONL files: queries with relevant documents, and pairs with labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.data.json_lines import JsonLines
from holdfast.train.embedding.data.text_row import RowFields, checked_number, checked_text, parse_row

PathLike = str | Path


@dataclass(frozen=True, slots=True)
class RetrievalSet:
    """Queries, documents, and which belong together: for each query the numbers of its documents with their grades.

    Documents that a model scores equally are ranked in the order in which they stand here.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    relevant: Sequence[Mapping[int, float]]

    def __post_init__(self) -> None:
        if not self.queries or not self.documents or len(self.queries) != len(self.relevant):
            raise InvalidArgument(
                f"{len(self.queries)} queries, {len(self.documents)} documents and the relevant documents of "
                f"{len(self.relevant)} queries: each query needs its own, and there must be some"
            )
        for number, relevant in enumerate(self.relevant):
            grades = all(math.isfinite(grade) and grade > 0 for grade in relevant.values())
            if not relevant or not grades or not all(0 <= each < len(self.documents) for each in relevant):
                raise InvalidArgument(f"query {number} needs documents of the set, each with a grade above 0")

    @classmethod
    def read(cls, queries: PathLike, documents: PathLike, relevant: PathLike) -> RetrievalSet:
        """Read a set from three JSONL files, as benchmarks have it.

        Args:
            queries: Lines with "id" and "text".
            documents: Lines with "id" and "text". Documents that a model scores equally are ranked by id.
            relevant: Lines with "query" and "document", which are ids, and "grade", a number that is 1 if left out; of
                grade 0 are documents that were judged not to belong to the query.

        A query without a relevant document is left out.
        """
        by_id = [_read_texts(Path(path)) for path in (queries, documents)]
        places = {name: number for number, name in enumerate(sorted(by_id[1]))}
        found: dict[str, dict[int, float]] = {name: {} for name in by_id[0]}
        file = JsonLines(relevant)
        for number, record in file.scan():
            try:
                query, document = (
                    _known_id(record, name, known, path)
                    for name, known, path in zip(("query", "document"), by_id, (queries, documents), strict=True)
                )
                grade = _grade(record.get("grade", 1))
                if places[document] in found[query]:
                    raise ValueError(f"the document {document!r} was given for the query {query!r} before")
            except ValueError as error:
                raise InvalidArgument(f"{file.place(number)}: {error}") from None
            found[query][places[document]] = grade
        used = {query: {each: grade for each, grade in of.items() if grade} for query, of in found.items()}
        asked = [query for query in by_id[0] if used[query]]
        if not asked:
            raise InvalidArgument(f"{file.path}: no query has a relevant document")
        return cls(
            [by_id[0][query] for query in asked], [by_id[1][name] for name in places], [used[query] for query in asked]
        )

    @classmethod
    def from_rows(cls, path: PathLike, fields: RowFields | None = None) -> RetrievalSet:
        """Read a set from a JSONL file with rows as for training.

        The documents are all positives and negatives of the file, equal texts once; a query's relevant ones are its
        positives, in whichever rows it stands.
        """
        queries: dict[str, dict[int, float]] = {}
        documents: dict[str, int] = {}
        file = JsonLines(path)
        for number, record in file.scan():
            try:
                row = parse_row(record, fields or RowFields())
            except ValueError as error:
                raise InvalidArgument(f"{file.place(number)}: {error}") from None
            query, *texts = row.texts
            numbers = [documents.setdefault(text, len(documents)) for text in texts]
            queries.setdefault(query, {})[numbers[0]] = 1.0
        if not queries:
            raise InvalidArgument(f"{file.path}: the file has no rows")
        return cls(list(queries), list(documents), list(queries.values()))


@dataclass(frozen=True, slots=True)
class SimilaritySet:
    """Pairs of texts, and a label of each that grows with their similarity."""

    left: Sequence[str]
    right: Sequence[str]
    labels: Sequence[float]

    def __post_init__(self) -> None:
        if not len(self.left) == len(self.right) == len(self.labels) or len(self.labels) < 2:
            raise InvalidArgument(
                f"{len(self.left)} and {len(self.right)} texts with {len(self.labels)} labels: a correlation needs as "
                "many of each, and at least 2"
            )

    @classmethod
    def read(cls, path: PathLike, fields: RowFields | None = None) -> SimilaritySet:
        """Read a set from a JSONL file with rows as for training, each with a label; negatives are not used."""
        names = fields or RowFields()
        file = JsonLines(path)
        rows = []
        for number, record in file.scan():
            try:
                row = parse_row(record, names)
                if row.label is None:
                    raise ValueError(f"the row has no {names.label!r}")
            except ValueError as error:
                raise InvalidArgument(f"{file.place(number)}: {error}") from None
            rows.append((row.texts[0], row.texts[1], row.label))
        if len(rows) < 2:
            raise InvalidArgument(f"{file.path}: {len(rows)} rows, and a correlation needs at least 2")
        left, right, labels = zip(*rows, strict=True)
        return cls(left, right, labels)


def _read_texts(path: Path) -> dict[str, str]:
    """Return the texts of a file by id."""
    file = JsonLines(path)
    texts: dict[str, str] = {}
    for number, record in file.scan():
        try:
            name = _id(record, "id")
            if name in texts:
                raise ValueError(f"the id {name!r} was used before")
            texts[name] = checked_text(record.get("text"), "'text'")
        except ValueError as error:
            raise InvalidArgument(f"{file.place(number)}: {error}") from None
    if not texts:
        raise InvalidArgument(f"{path}: the file has no rows")
    return texts


def _known_id(record: Mapping[str, Any], name: str, known: Mapping[str, str], path: PathLike) -> str:
    found = _id(record, name)
    if found not in known:
        raise ValueError(f"the {name} {found!r} is not in {path}")
    return found


def _id(record: Mapping[str, Any], name: str) -> str:
    found = record.get(name)
    if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
        raise ValueError(f"{name!r} needs an id, a text or an integer; the fields are {', '.join(map(repr, record))}")
    return str(found)


def _grade(value: object) -> float:
    grade = checked_number(value, "'grade'")
    if grade < 0:
        raise ValueError(f"'grade' is {grade}: it must be at least 0")
    return grade
