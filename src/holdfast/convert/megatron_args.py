"""Compare a config.json with Megatron's args in what no shape shows: rotary embeddings, norms, tying, routing.

A wrong value gives a model that opens without a warning and computes something else. An arg that the checkpoint
does not have is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.convert import effective_config as effective
from holdfast.convert.effective_config import Config, as_int
from holdfast.convert.megatron_pairs import LATENT, RMS_NORM, Args, pairs

_HEAD, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_LONGER = ("yarn", "dynamic", "longrope")  # ways to read longer texts than in training, which are added later
# Args of a layout of weights that no model of the hub's families has.
_FOREIGN_LAYOUTS = {
    "apply_layernorm_1p": "weights of norms are stored minus 1",
    "rotary_interleaved": "the rows of q and k have another order",
}


def contradictions(args: Any, config: Config, stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of a config.json Megatron's args contradict, with both values; `stored` are the weights' specs."""
    if not isinstance(args, Mapping):
        return
    for pair in pairs(args, config):
        if pair.differs():
            yield f"{pair.name} is {_shown(pair.given)}, and the args have {pair.argument} {_shown(pair.trained)}"
    yield from _tying(args, config, stored)
    yield from _window(args, config)


def layout_contradictions(args: Any, config: Config) -> Iterator[str]:
    """Yield the args by which weights are stored as no built-in mapping reads them."""
    if not isinstance(args, Mapping) or effective.family_name(config) not in (*RMS_NORM, "gpt2"):
        return
    for name, meaning in _FOREIGN_LAYOUTS.items():
        if args.get(name) is True and not (name == "rotary_interleaved" and args.get(LATENT)):
            yield f"the args have {name}, by which {meaning}, and a model of type {config.get('model_type')} has not"


def notes_of(args: Any, config: Config, stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes about values that may differ on purpose, and about those that could not be compared."""
    known = args if isinstance(args, Mapping) else {}
    notes = [*_vocabulary(known, config), *_positions(known, config), *_longer(known, config)]
    apart = _HEAD in stored and stored[_HEAD] is not stored.get(_EMBEDDING)
    if apart and effective.is_tied(config) and "untie_embeddings_and_output_weights" not in known:
        notes.append(
            "tie_word_embeddings of config.json is true, and the checkpoint stores both the embedding and a head: if "
            "they differ, set it to false"
        )
    unknown = [
        f"{name} {value:g}"
        for name, argument, value in (
            ("rope_theta", "rotary_base", effective.rope_theta(config)),
            (effective.epsilon_field(config), "norm_epsilon", effective.epsilon(config)),
        )
        if value is not None and argument not in known
    ]
    if unknown:
        notes.append(
            f"{' and '.join(unknown)} of config.json not compared: the checkpoint has no args for this, and no shape "
            "shows it"
        )
    return tuple(notes)


def _tying(args: Args, config: Config, stored: Mapping[str, Any]) -> Iterator[str]:
    untied, tied = args.get("untie_embeddings_and_output_weights"), effective.is_tied(config)
    if not isinstance(untied, bool) or tied is None:
        return
    if tied and untied:
        yield (
            "tie_word_embeddings is true, and the args have untie_embeddings_and_output_weights True: the head would "
            "be lost"
        )
    if not tied and not untied and _HEAD not in stored:
        yield (
            "tie_word_embeddings is false, and the args have untie_embeddings_and_output_weights False, without a "
            "head in the checkpoint"
        )


def _window(args: Args, config: Config) -> Iterator[str]:
    """Yield a contradiction of attention windows. Megatron counts the tokens to the left, with or without the last."""
    if "window_size" not in args:
        return
    trained, given = args["window_size"], effective.window(config)
    left = trained[0] if isinstance(trained, list | tuple) and trained else trained
    left = as_int(left)
    left = left if left is not None and left >= 0 else None
    if given != left and (given is None or left not in (given, given - 1)):
        yield f"the attention window (sliding_window) is {given}, and the args have window_size {trained}"


def _vocabulary(args: Args, config: Config) -> Iterator[str]:
    given, tokens = _int(config, "vocab_size"), _int(args, "vocab_size")
    if given is not None and tokens is not None and given > tokens:
        yield (
            f"vocab_size of config.json is {given}, and the run's args have {tokens}: rows {tokens} to {given - 1} are "
            f"padding or unused, and are kept; a config.json with {tokens} leaves them out"
        )


def _positions(args: Args, config: Config) -> Iterator[str]:
    given, trained = _int(config, "max_position_embeddings"), _int(args, "max_position_embeddings")
    if given is not None and trained is not None and given != trained:
        yield (
            f"max_position_embeddings of config.json is {given}, and the run's args have {trained}; it is kept, and "
            "changes no weight"
        )


def _longer(args: Args, config: Config) -> Iterator[str]:
    kind = effective.rope_type(config)
    if kind in _LONGER and args and args.get(LATENT) is not True and args.get("position_embedding_type") != kind:
        yield f"rope_scaling of config.json is {kind}, and the run's args have none: check that it is meant"


def _shown(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _int(fields: Mapping[str, Any], name: str) -> int | None:
    return as_int(fields.get(name))
