"""Reading a folder of sentence-transformers: which settings its files mean, and where its encoder is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast.core.errors import Damaged, InvalidArgument, NotFound, Unsupported
from holdfast.format import strictjson
from holdfast.train.embedding.embedding_settings import POOLINGS, EmbeddingSettings
from holdfast.train.embedding.sentence_files import MODULES, POOLING_FLAGS, SENTENCES, TRANSFORMER

_ORDERS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
# Settings of the first module that change vectors and that nothing here does, with the values that change nothing.
_TRANSFORMER_ONLY: dict[str, tuple[Any, ...]] = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "do_lower_case": (False,),
    "processing_kwargs": ({},),
    "query_length": (None,),
    "document_length": (None,),
    "query_expansion": (None,),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
}
_ARGUMENTS = ("model_args", "tokenizer_args", "config_args", "model_kwargs", "processor_kwargs", "config_kwargs")
_HARMLESS = {"trust_remote_code", "dtype", "torch_dtype", "attn_implementation"}


@dataclass(frozen=True, slots=True)
class SentenceFolder:
    """The settings that a folder of sentence-transformers has, and the folder of its encoder and tokenizer."""

    settings: EmbeddingSettings
    encoder: Path


def read_sentence_folder(folder: str | Path) -> SentenceFolder:
    """Read the settings that sentence-transformers, or a save of an `EmbeddingModel`, wrote into a folder.

    Raises NotFound without modules.json, Damaged for files that cannot be read, and Unsupported for modules and
    settings that would change the vectors and that `EmbeddingModel` does not have.
    """
    folder = Path(folder)
    if not (folder / MODULES).exists():
        raise NotFound(f"{folder} has no {MODULES}: it is no folder of sentence-transformers, so give the settings")
    modules = _modules(folder)
    encoder = folder / modules["Transformer"]
    transformer = _read(encoder / TRANSFORMER, optional=True)
    _check_transformer(transformer, encoder / TRANSFORMER)
    if "Normalize" in modules:
        _check_normalize(folder / modules["Normalize"] / "config.json")
    pooling = _pooling(folder / modules["Pooling"] / "config.json")
    values = {**_of_encoder(encoder / "config.json"), **pooling, **_of_sentences(folder / SENTENCES)}
    try:
        settings = EmbeddingSettings(
            normalize="Normalize" in modules, max_length=transformer.get("max_seq_length"), **values
        )
    except (InvalidArgument, TypeError) as error:
        raise Damaged(f"{folder}: the settings of sentence-transformers: {error}") from None
    return SentenceFolder(settings, encoder)


def _modules(folder: Path) -> dict[str, str]:
    """Return the path of each module by kind."""
    where = folder / MODULES
    listed = _json(where)
    try:
        found = [(str(entry["type"]), str(entry["path"])) for entry in listed]
    except (TypeError, KeyError) as error:
        raise Damaged(f"{where}: expected a list of modules with type and path: {error!r}") from None
    for kind, path in found:
        if not kind.startswith("sentence_transformers.") or _kind(kind) not in _ORDERS[1]:
            raise Unsupported(
                f"{where}: the module {_kind(kind)} ({kind}) is not supported, only {', '.join(_ORDERS[1])}"
            )
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise Damaged(f"{where}: the module {_kind(kind)} has the path {path!r}, outside of the folder")
    kinds = [_kind(kind) for kind, _ in found]
    if kinds not in _ORDERS:
        raise Unsupported(
            f"{where}: the modules {', '.join(kinds) or '(none)'} are not supported in this order, only Transformer, "
            "Pooling and, after them, Normalize"
        )
    return {_kind(kind): path for kind, path in found}


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _check_transformer(config: Mapping[str, Any], where: Path) -> None:
    for name, allowed in _TRANSFORMER_ONLY.items():
        if config.get(name, allowed[0]) not in allowed:
            hint = " (texts would be rendered by the chat template)" if "message" in str(config[name]) else ""
            raise Unsupported(f"{where}: {name}={config[name]!r} is not supported, only {allowed[0]!r}{hint}")
    for name in _ARGUMENTS:
        unknown = sorted(set(config.get(name) or {}) - _HARMLESS)
        if unknown:
            raise Unsupported(
                f"{where}: {name} has {', '.join(unknown)}, which is not supported: put it in config.json"
            )


def _check_normalize(where: Path) -> None:
    config = _read(where, optional=True)
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            raise Unsupported(f"{where}: {name}={config[name]!r} is not supported, only 'sentence_embedding'")


def _pooling(where: Path) -> dict[str, Any]:
    config = _read(where)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for mode, flag in POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1:
        raise Unsupported(f"{where}: {len(modes)} pooling modes, joined ({', '.join(map(str, modes))}); choose one")
    if modes[0] not in POOLINGS:
        raise Unsupported(f"{where}: the pooling mode {modes[0]!r} is not supported, only {', '.join(POOLINGS)}")
    return {"pooling": str(modes[0]), "include_prompt": config.get("include_prompt", True)}


def _of_encoder(where: Path) -> dict[str, Any]:
    config = _read(where)
    return {"causal": config.get("is_causal") is not False, "dims": config.get("matryoshka_dimensions") or ()}


def _of_sentences(where: Path) -> dict[str, Any]:
    """Return the settings of the whole model. An absent file, as in folders of early versions, has none."""
    config = _read(where, optional=True)
    kind = config.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise Unsupported(f"{where}: model_type {kind!r} is not supported, only 'SentenceTransformer'")
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise Damaged(f"{where}: prompts={prompts!r}, expected texts by name")
    return {
        "prompts": {name: text or "" for name, text in prompts.items()},
        "default_prompt": config.get("default_prompt_name"),
        "truncate_dim": config.get("truncate_dim"),
        "similarity": config.get("similarity_fn_name") or "cosine",
    }


def _read(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    content = _json(path)
    if not isinstance(content, dict):
        raise Damaged(f"{path}: expected settings by name, not a {type(content).__name__}")
    return content


def _json(path: Path) -> Any:
    try:
        return strictjson.loads(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise NotFound(f"{path} is missing: the folder of sentence-transformers is not complete") from None
