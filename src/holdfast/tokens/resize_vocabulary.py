"""`holdfast resize-vocab`: another number of rows for the vocabulary of a checkpoint, streamed, optimizer included."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.convert.computed import ComputedTensors
from holdfast.convert.dequantize import Recoded
from holdfast.convert.publish_output import Watch, no_watch
from holdfast.convert.run import Converted, ConvertOptions, convert
from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.core.names import group_folder, masters_group
from holdfast.core.ranks import Ranks
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.sources import open_source
from holdfast.sources.foreign import Foreign, with_contents
from holdfast.tokens.row_options import check_init, rows_for
from holdfast.tokens.stored_vocabulary import CONFIG, FLOATS, StoredVocabulary, vocabulary_of, with_rows_stated
from holdfast.tokens.tokenizer_files import known_ids
from holdfast.tokens.vocabulary_rows import MeanRows, ZeroRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeOptions:
    """How a vocabulary is resized.

    `size` is the number of rows, rounded up to a multiple of `pad_to`. New rows begin as the mean of the rows of known
    tokens, or as zero (`init="zero"`). `keys` are patterns of embeddings whose names are not the usual ones. `shrink`
    allows fewer rows than there are. Raises InvalidArgument for values that make no sense.
    """

    size: int
    pad_to: int | None = None
    init: str = "mean"
    keys: Sequence[str] = ()
    shrink: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise InvalidArgument(f"size={self.size!r}: a number of rows of at least 1")
        check_init(self.init)
        rows_for(1, 1, self.pad_to)

    @property
    def rows(self) -> int:
        """The rows of the resized vocabulary."""
        return rows_for(self.size, 0, self.pad_to)


def resize_vocab(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    options: ResizeOptions,
    *,
    to: str | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = True,
    force: bool = False,
    ranks: Ranks | None = None,
    watch: Watch = no_watch,
) -> Converted:
    """Write a checkpoint with another number of rows for its tokens. The destination appears atomically.

    Every known row keeps its bits. Masters, averages and the optimizer's state follow; new rows are the mean of the
    rows of known tokens, or zero, those of an optimizer's state zero. vocab_size of config.json is rewritten, all
    other files are copied byte for byte. A vocabulary shrinks only with `shrink`, and never below the ids of the
    tokenizer. Collective, like `convert`.

    `to` is the format to write, "hf" or "holdfast"; by default that of the source. `verify` checks the digests of what
    is read, `force` replaces a checkpoint at the destination. `watch` is called with the progress; without `ranks`,
    this process does all of it. Raises Unsupported for a checkpoint of adapters or without a model, and
    InvalidArgument where the vocabulary has that many rows already, or would shrink without `shrink`.
    """
    if to is None:
        to = "hf" if isinstance(open_source(source), Foreign) else "holdfast"
    if to not in ("hf", "holdfast"):
        raise InvalidArgument(f"to={to!r}: a resized checkpoint is written as 'hf' or 'holdfast'")

    def recode(opened: Checkpoint, files: Mapping[str, bytes]) -> Recoded:
        return resized(opened, files, options)

    convert_options = ConvertOptions(to=to, max_shard_size=max_shard_size, verify=verify, force=force, recode=recode)
    return convert(source, destination, convert_options, ranks, watch)


def resized(source: Checkpoint, files: Mapping[str, bytes], options: ResizeOptions) -> Recoded:
    """Return a source with other rows for its tokens, and its side files. No tensor is read."""
    modules = [name for name, group in source.contents.groups.items() if group.kind == "module"]
    found = _vocabularies(source, files, options, modules)
    resizing = _Resizing(source, options)
    out, notes = dict(files), []
    for vocabulary in found:
        resizing.resize_module(vocabulary, _known_rows(files, vocabulary, options))
        config = f"{group_folder(vocabulary.group)}{CONFIG}"
        if config in out:
            out[config] = with_rows_stated(out[config], vocabulary.rows, options.rows)
        keys = ", ".join(vocabulary.keys)
        notes.append(f"{vocabulary.group}: {keys} have {options.rows} rows, before {vocabulary.rows}")
    resizing.resize_optimizers(found)
    stored = (*source.contents.files, *resizing.computed.stored_files())
    contents = replace(source.contents, groups=resizing.groups, files=stored)
    return Recoded(with_contents(source, contents, {}, resizing.computed.files), out, tuple(notes))


def _vocabularies(
    source: Checkpoint, files: Mapping[str, bytes], options: ResizeOptions, modules: Sequence[str]
) -> list[StoredVocabulary]:
    others = [name for name, group in source.contents.groups.items() if group.kind in ("adapter", "base")]
    if others or not modules:
        kind = "adapters" if others else "no model"
        raise Unsupported(f"{source.path} has {kind}: resize the vocabulary of the base model in a folder of its own")
    found = [vocabulary_of(name, source.contents, files, options.keys) for name in modules]
    for vocabulary in found:
        if options.rows == vocabulary.rows:
            raise InvalidArgument(f"{vocabulary.group}: the vocabulary has {vocabulary.rows} rows already")
        if options.rows < vocabulary.rows and not options.shrink:
            raise InvalidArgument(
                f"{vocabulary.group}: {options.rows} rows are fewer than the {vocabulary.rows} there are; to drop "
                "padding, pass --shrink"
            )
    return found


def _known_rows(files: Mapping[str, bytes], vocabulary: StoredVocabulary, options: ResizeOptions) -> int:
    """Return how many rows belong to tokens of the tokenizer; all of them if it is not known."""
    folder = group_folder(vocabulary.group)
    ids = known_ids(files, folder) or (known_ids(files) if folder else None)
    if ids is None:
        if options.rows < vocabulary.rows:
            raise Unsupported(f"{vocabulary.group}: which rows are padding is not known: there is no tokenizer.json")
        return vocabulary.rows
    last = max(ids)
    if last >= options.rows:
        raise InvalidArgument(f"{options.rows} rows are too few: the tokenizer has ids up to {last}, {ids[last]!r}")
    return min(last + 1, vocabulary.rows)


class _Resizing:
    """The groups of a checkpoint while their tensors get other rows."""

    def __init__(self, source: Checkpoint, options: ResizeOptions) -> None:
        self._source = source
        self._options = options
        self.computed = ComputedTensors(source)
        self.groups: dict[str, Group] = dict(source.contents.groups)

    def resize_module(self, vocabulary: StoredVocabulary, used: int) -> None:
        """Resize the tensors of a module, and their masters, whose new rows are those of the weights."""
        group = self.groups[vocabulary.group]
        tensors = dict(group.tensors)
        for key in vocabulary.keys:
            new = self._new_rows(f"{vocabulary.group}/{key}", tensors[key], used)
            tensors[key] = self._with(tensors[key], new)
            self._resize_master(masters_group(vocabulary.group), key, new)
        self.groups[vocabulary.group] = replace(group, tensors=tensors)

    def _resize_master(self, name: str, key: str, new: Recipe[Place] | None) -> None:
        masters = self.groups.get(name)
        if masters is not None and key in masters.tensors:
            recipe = masters.tensors[key]
            rows = None if new is None else new.cast(recipe.dtype)
            self.groups[name] = replace(masters, tensors={**masters.tensors, key: self._with(recipe, rows)})

    def resize_optimizers(self, found: Sequence[StoredVocabulary]) -> None:
        """Resize the states of the tensors in every optimizer; their new rows are zero."""
        groups = self._source.contents.groups
        shapes = {key: groups[each.group].tensors[key].shape for each in found for key in each.keys}
        for name, group in list(self.groups.items()):
            if group.kind != "optimizer":
                continue
            if "spans" in (self._source.contents.state.get(name) or {}):
                raise Unsupported(f"{name}: one state belongs to all parameters, as in LBFGS; {_leave_out(name)}")
            tensors = dict(group.tensors)
            for key, state in _row_states(group, shapes):
                recipe = tensors[state]
                if recipe.shape != shapes[key] or recipe.dtype.name not in FLOATS:
                    found_text = f"{recipe.dtype.name}{list(recipe.shape)}"
                    raise Unsupported(
                        f"{name}: {state} is {found_text}, not a state with a row for each token; {_leave_out(name)}"
                    )
                tensors[state] = self._with(recipe, self._zeros(f"{name}/{state}", recipe))
            self.groups[name] = replace(group, tensors=tensors)

    def _with(self, recipe: Recipe[Place], new: Recipe[Place] | None) -> Recipe[Place]:
        """Return a tensor with new rows below its own, or with its first rows if there are none."""
        if new is None:
            return recipe.narrow(0, 0, self._options.rows)
        return Recipe.concat([recipe, new], 0)

    def _new_rows(self, name: str, recipe: Recipe[Place], used: int) -> Recipe[Place] | None:
        added = self._options.rows - recipe.shape[0]
        if added <= 0:
            return None
        if self._options.init == "zero":
            return self._zeros(name, recipe)
        matrix = recipe if len(recipe.shape) == 2 else recipe.unsqueezed(1)
        made = self.computed.add(name, MeanRows(matrix, used, added))
        return made if len(recipe.shape) == 2 else made.squeezed(1)

    def _zeros(self, name: str, recipe: Recipe[Place]) -> Recipe[Place] | None:
        added = self._options.rows - recipe.shape[0]
        if added <= 0:
            return None
        is_matrix = len(recipe.shape) == 2
        made = self.computed.add(name, ZeroRows((added, recipe.shape[1] if is_matrix else 1), recipe.dtype))
        return made if is_matrix else made.squeezed(1)


def _row_states(group: Group, keys: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the parameters with rows for tokens, with each of their states that is no scalar."""
    for state, recipe in group.tensors.items():
        key = next((key for key in keys if state.startswith(f"{key}/")), None)
        if key is not None and recipe.shape:
            yield key, state


def _leave_out(name: str) -> str:
    return f"leave the optimizer out first: holdfast convert SRC DST --remove {name}"
