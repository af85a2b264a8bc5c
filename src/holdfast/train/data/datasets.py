"""Datasets of token sequences: packed token files, text as bytes, and synthetic data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import InvalidArgument, NotFound

Tokens = NDArray[np.int64]
_KINDS = ("tokens", "text", "synthetic")
_TOKEN_DTYPES = {"uint16": np.uint16, "uint32": np.uint32}


class Dataset(Protocol):
    """Samples of `sequence + 1` tokens each: the inputs, and the labels shifted by one."""

    name: str

    def __len__(self) -> int: ...

    def read(self, indices: NDArray[np.int64]) -> Tokens:
        """Return the samples as rows."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The source of samples.

    kind: "tokens" (a flat file of token ids, `dtype` uint16 or uint32, memory-mapped), "text" (any file,
    one token per byte) or "synthetic" (`samples` generated sequences that a model can learn). The last
    `evaluation_samples` samples are reserved for evaluation.
    """

    kind: str = "synthetic"
    path: str = ""
    sequence: int = 64
    dtype: str = "uint16"
    samples: int = 4096
    evaluation_samples: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InvalidArgument(f"data.kind={self.kind!r}: choose one of {', '.join(_KINDS)}")
        if self.dtype not in _TOKEN_DTYPES:
            raise InvalidArgument(f"data.dtype={self.dtype!r}: choose uint16 or uint32")
        if (self.kind == "synthetic") == bool(self.path):
            need = "takes no data.path" if self.path else "needs a data.path"
            raise InvalidArgument(f"data.kind={self.kind!r} {need}")
        if self.sequence < 1 or self.samples < 1 or self.evaluation_samples < 0:
            raise InvalidArgument("data.sequence and data.samples must be 1 or more, data.evaluation_samples 0 or more")
        if self.seed < 0:
            raise InvalidArgument(f"data.seed={self.seed} must be at least 0")


class PackedTokens:
    """A flat file of token ids, split into sequences; memory-mapped."""

    def __init__(self, path: str | Path, sequence: int, dtype: Any) -> None:
        try:
            size = Path(path).stat().st_size
            self._tokens = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)
        except (OSError, ValueError) as error:
            raise NotFound(f"{path}: cannot read a file of {np.dtype(dtype).name} tokens: {error}") from None
        if len(self._tokens) <= sequence:
            raise InvalidArgument(f"{path} has {len(self._tokens)} tokens; one sample needs {sequence + 1}")
        self._sequence = sequence
        self.name = f"{Path(path).name}:{len(self._tokens)}x{np.dtype(dtype).name}/{sequence}"

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._sequence

    def read(self, indices: NDArray[np.int64]) -> Tokens:
        starts = indices[:, None] * self._sequence + np.arange(self._sequence + 1)
        return np.asarray(self._tokens[starts], dtype=np.int64)


class Synthetic:
    """Sequences that count up by a random stride, with a few wrong tokens, so that learning takes a while."""

    def __init__(self, samples: int, sequence: int, vocabulary: int, seed: int) -> None:
        self._samples, self._sequence, self._vocabulary, self._seed = samples, sequence, vocabulary, seed
        self.name = f"synthetic:{samples}x{sequence}/{vocabulary}/{seed}"

    def __len__(self) -> int:
        return self._samples

    def read(self, indices: NDArray[np.int64]) -> Tokens:
        return np.stack([self._sample(int(index)) for index in indices]) if len(indices) else self._empty()

    def _empty(self) -> Tokens:
        return np.empty((0, self._sequence + 1), np.int64)

    def _sample(self, index: int) -> Tokens:
        random = np.random.default_rng([self._seed, index])
        stride, start = random.integers(1, 8), random.integers(self._vocabulary)
        tokens = (start + stride * np.arange(self._sequence + 1)) % self._vocabulary
        wrong = random.random(self._sequence + 1) < 0.05
        tokens[wrong] = random.integers(self._vocabulary, size=int(wrong.sum()))
        return np.asarray(tokens, dtype=np.int64)


class DatasetSlice:
    """A range of another dataset's samples."""

    def __init__(self, whole: Dataset, begin: int, end: int) -> None:
        self._whole, self._begin, self._end = whole, begin, end
        self.name = f"{whole.name}[{begin}:{end}]"

    def __len__(self) -> int:
        return self._end - self._begin

    def read(self, indices: NDArray[np.int64]) -> Tokens:
        return self._whole.read(indices + self._begin)


def open_datasets(config: DataConfig, vocabulary: int) -> tuple[Dataset, Dataset | None]:
    """Return the training dataset, and the evaluation dataset if the config reserves samples for it."""
    whole = _open(config, vocabulary)
    left = len(whole) - config.evaluation_samples
    if left < 1:
        raise InvalidArgument(
            f"data.evaluation_samples={config.evaluation_samples} of {len(whole)} samples leaves none to train on: "
            f"use at most {len(whole) - 1}"
        )
    if not config.evaluation_samples:
        return whole, None
    return DatasetSlice(whole, 0, left), DatasetSlice(whole, left, len(whole))


def _open(config: DataConfig, vocabulary: int) -> Dataset:
    if config.kind == "synthetic":
        return Synthetic(config.samples, config.sequence, vocabulary, config.seed)
    if not config.path:
        raise InvalidArgument(f"data.path is empty: data of kind {config.kind!r} needs a file")
    if config.kind == "text" and vocabulary < 256:
        raise InvalidArgument(f"the vocabulary has {vocabulary} tokens; text as bytes needs 256")
    return PackedTokens(
        config.path, config.sequence, np.uint8 if config.kind == "text" else _TOKEN_DTYPES[config.dtype]
    )
