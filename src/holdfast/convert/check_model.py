"""Compare mapped weights with the model that their config.json describes, as from_pretrained would report it later.

transformers gives every weight that it does not find an initial value, and only warns. Where it is installed, it
builds the model on the meta device. Otherwise only the head and the width of the MLPs are compared.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.mapping import families
from holdfast.plan.contents import Contents, Group
from holdfast.plan.quantized_keys import quantized_weights

Shape = tuple[int, ...]
Config = Mapping[str, Any]

_HEAD = "lm_head.weight"
_GENERATING = ("ForCausalLM", "LMHeadModel")
_MLP = re.compile(r"(?:.*\.)?layers\.[0-9]+\.mlp\.(?:gate|up)_proj\.weight")
_NEVER_LOADED = re.compile(r".*(?:inv_freq|\._extra_state)")  # buffers without a place in today's models
_LAYER = re.compile(r"(?:.*\.)?layers\.([0-9]+)\..+")
_NAMED = 3


@dataclass(slots=True)
class _Differences:
    missing: list[str]
    unexpected: list[str]
    shapes: list[str]


def check_model(
    contents: Contents,
    selected: Contents,
    config: Config,
    name: str = "config.json",
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Raise Mismatch if a mapped model is not that of its config.json. Models of custom code are not compared.

    `selected` are the contents that are written: a key that the user removed is no unexpected one. `name` is the
    file that the config is from. `on_wait` is called before transformers is imported.
    """
    group = contents.groups.get("model")
    if group is None or config.get("auto_map"):
        return
    quantized = quantized_weights({key: recipe.dtype.name for key, recipe in group.tensors.items()}).values()
    if any(weight.is_packed for weight in quantized):
        return
    scales = {key for weight in quantized for key in weight.companions}
    stored = {key: shape for key, shape in _written_shapes(group, config).items() if key not in scales}
    found = _by_transformers(stored, config, on_wait)
    if found is None:
        found = _Differences(list(_missing_head(stored, config)), [], list(_other_widths(stored, config)))
    if "model" in selected.groups:
        kept = {*selected.groups["model"].tensors, *selected.groups["model"].aliases}
        found.unexpected = [key for key in found.unexpected if key in kept and not _is_never_loaded(key, config)]
    if found.missing or found.unexpected or found.shapes:
        raise Mismatch(_message(found, config, name))


def unknown_names(
    contents: Contents, config: Config, name: str = "config.json", on_wait: Callable[[], None] = lambda: None
) -> str | None:
    """Return what is wrong if no weight has a name of the model of its config.json; None if any has.

    For weights that no mapping gave their names. A part of a model is not refused: from_pretrained reports it.
    """
    group = contents.groups.get("model")
    if group is None or not group.tensors or config.get("auto_map"):
        return None
    stored = _written_shapes(group, config)
    found = _by_transformers(stored, config, on_wait)
    if found is None or found.shapes or len(found.unexpected) < len(stored):
        return None
    return (
        f"no weight has a name of the model of {name} (model_type {config.get('model_type')!r}), which has "
        f"{_some(found.missing)}; the source has {_some(list(stored))}; give a mapping to the hub's names with --map"
    )


def _written_shapes(group: Group, config: Config) -> dict[str, Shape]:
    """Return the shapes of what is written: tied tensors once, unless the config says that they are not tied."""
    shapes = {key: tuple(recipe.shape) for key, recipe in group.tensors.items()}
    if config.get("tie_word_embeddings") is False:
        shapes |= {alias: shapes[key] for alias, key in group.aliases.items()}
    return shapes


def _message(found: _Differences, config: Config, name: str) -> str:
    parts = [
        f"{label} {_some(keys)}"
        for label, keys in (
            ("it lacks", found.missing), ("the model has no", found.unexpected), ("other shapes:", found.shapes),
        )
        if keys
    ]  # fmt: skip
    way_out = "give the model's own config.json with --config (or correct SRC's), or a mapping that fits it with --map"
    if found.missing == [_HEAD]:
        way_out = (
            f"if the head shares the embedding, set tie_word_embeddings to true in config.json; otherwise {way_out}"
        )
    elif found.unexpected and not found.missing and not found.shapes:
        way_out += "; --remove PATTERN leaves keys out"
    return (
        f"the result is not the model of {name} (model_type {config.get('model_type')!r}): {'; '.join(parts)}; "
        f"from_pretrained would give missing weights initial values; {way_out}"
    )


def _some(keys: Collection[str]) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(list(keys)[:_NAMED]) + more


def _by_transformers(stored: Mapping[str, Shape], config: Config, on_wait: Callable[[], None]) -> _Differences | None:
    """Return what transformers would report; None if it is not installed, or does not know the model."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        return None
    on_wait()
    try:
        import transformers
    except ImportError:
        return None
    from holdfast.adapters.hub.rules import names_in_memory
    from holdfast.adapters.hub.traced_tensor import UntracedOperation

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the code of models
        model = _model_on_meta(transformers, config)
        if model is None:
            return None
        tensors = model.state_dict(keep_vars=True)
        live = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        try:
            made = names_in_memory(model, stored, live)
        except UntracedOperation:
            return None
    filled = {id(tensors[key]) for key in made}  # tied tensors are one object
    used = {key for value in made.values() for key in _sources(value.operation)}
    return _Differences(
        _without([key for key, tensor in tensors.items() if id(tensor) not in filled], model, "missing"),
        _without([key for key in stored if key not in used], model, "unexpected"),
        [f"{key} is {list(made[key].shape)}, not {list(live[key])}" for key in made if made[key].shape != live[key]],
    )


def _model_on_meta(transformers: Any, config: Config) -> Any:
    """Return the model that from_pretrained would build, without memory; None if it would fail."""
    import torch

    fields = {name: value for name, value in config.items() if name != "quantization_config"}
    try:
        built = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(fields)
        with torch.device("meta"):
            if _generates(config):
                return transformers.AutoModelForCausalLM.from_config(built, trust_remote_code=False)
            return getattr(transformers, config["architectures"][0])._from_config(built)
    except Exception:  # noqa: BLE001  (code of other models; from_pretrained says what is wrong with the config)
        return None


def _without(keys: Iterable[str], model: Any, kind: str) -> list[str]:
    """Return the keys that a model does not ask from_pretrained to ignore."""
    ignored = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return [key for key in keys if not any(re.search(pattern, key) for pattern in ignored)]


def _sources(operation: Any) -> Iterator[str]:
    """Yield the stored keys that a traced operation begins with."""
    if operation.kind == "source":
        yield operation.key
    for value in operation.inputs:
        yield from _sources(value.operation)


def _generates(config: Config) -> bool:
    """Return True for a model with a head for text, which config.json also means without an architecture."""
    names = config.get("architectures") or []
    return not names or any(str(name).endswith(_GENERATING) for name in names)


def _is_never_loaded(key: str, config: Config) -> bool:
    """Return True for old buffers, and for the layers that predict further tokens: transformers has none of them."""
    match, count = _LAYER.fullmatch(key), config.get("num_hidden_layers")
    if config.get("num_nextn_predict_layers") and match is not None and isinstance(count, int):
        return int(match[1]) >= count
    return _NEVER_LOADED.fullmatch(key) is not None


def _missing_head(stored: Mapping[str, Shape], config: Config) -> Iterator[str]:
    if _generates(config) and _HEAD not in stored and _is_tied(config) is False:
        yield _HEAD


def _is_tied(config: Config) -> bool | None:
    """Return whether the head shares the embedding, by default as the family has it; None if it is not known."""
    tied = config.get("tie_word_embeddings")
    if isinstance(tied, bool):
        return tied
    try:
        return families.family_of(config).name == "gpt2"
    except InvalidArgument:
        return None


def _other_widths(stored: Mapping[str, Shape], config: Config) -> Iterator[str]:
    width = config.get("intermediate_size")
    for key, shape in stored.items():
        if type(width) is int and _MLP.fullmatch(key) and shape[0] != width:
            yield f"{key} is {list(shape)}, not {[width, *shape[1:]]}"
