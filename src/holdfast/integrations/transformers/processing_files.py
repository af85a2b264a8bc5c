"""Files published with every step: tokenizer or processor with its chat template, and trainer_state.json."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.core.names import extra_file_problem
from holdfast.core.warnings import warn
from holdfast.engine.extra_files import read_files


class ProcessingFiles:
    """The files of a trainer's processing class. They are written again only when it has changed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._version: Any = None
        self._files: dict[str, bytes] = {}

    def read(self) -> dict[str, bytes]:
        """Return the files by name, such as tokenizer.json; what must not be published is left out with a warning."""
        source = _processing_class(self._trainer)
        if source is None:
            return {}
        version = _version(source)
        if version != self._version:
            self._files, self._version = _written(source), version
        return dict(self._files)


def _processing_class(trainer: Any) -> Any:
    """Return what Trainer saves beside a model: the processing class, or the tokenizer of the collator."""
    found = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    return found if hasattr(found, "save_pretrained") else None


def _version(source: Any) -> Any:
    """Return a value that changes when tokens or the chat template do."""
    tokenizer = getattr(source, "tokenizer", source)
    length = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    options = [getattr(tokenizer, name, None) for name in ("padding_side", "truncation_side", "special_tokens_map")]
    return id(source), length, getattr(source, "chat_template", None), repr(options)


def _written(source: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="holdfast-processing-") as folder:
        source.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        named = {path.relative_to(folder).as_posix(): path for path in paths}
        try:
            return read_files({name: path for name, path in named.items() if _allowed(source, name)})
        except InvalidArgument as error:
            warn(f"the files of {type(source).__name__} are not published with the steps: {error}")
            return {}


def _allowed(source: Any, name: str) -> bool:
    problem = extra_file_problem(name)
    if problem is not None:
        warn(f"{name} of {type(source).__name__} is not published with the steps: it {problem}")
    return problem is None
