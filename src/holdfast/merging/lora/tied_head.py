"""The output embedding that a base ties to its input embedding, and whether an adapter gives it a tensor of its own.

PEFT trains a copy of a module in `modules_to_save`: the other module of the tie keeps the base's weight, unless the
config has `ensure_weight_tying`. LoRA on the input embedding is merged into the weight that both modules share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.errors import Mismatch, Unsupported
from holdfast.merging.lora.adapter import TOKENS, Adapter
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe

HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_FIELD = "tie_word_embeddings"
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel", "ForConditionalGeneration")
_WITHOUT_HEAD = ("Model", "Classification", "QuestionAnswering", "MultipleChoice", "NextSentencePrediction")
_INNER_MODEL = "language_model.model."
_OTHER_HEADS = {  # by model_type
    "cohere_asr": "proj_out.weight",
    "gpt_neox": "embed_out.weight",
    "gpt_neox_japanese": "embed_out.weight",
    "moonshine": "proj_out.weight",
    "whisper": "proj_out.weight",
}
_WITH_UNKNOWN_HEADS = ("biogpt", "speecht5", "t5gemma", "t5gemma2", "trocr")
_DECODERS = ("model.embed_tokens.weight", "transformer.wte.weight")  # keys of models whose head is lm_head

IsEqual = Callable[[Recipe[Place], Recipe[Place]], bool]
Spelling = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class TiedHead:
    """The keys of a tied head and of the embedding whose tensor it shares. `is_alias`: the base's files say so.

    `head` is empty if the base does not store the head and its name is not known.
    """

    head: str
    embedding: str
    is_alias: bool = False


@dataclass(frozen=True, slots=True)
class TieChange:
    """The effect of an adapter on a tie. `unties`: the head becomes a tensor of its own and begins as the embedding."""

    unties: bool
    note: str = ""


def tied_head(config: Mapping[str, Any], group: Group, is_equal: IsEqual) -> tuple[Group, TiedHead | None]:
    """Return a group without the tied head among its tensors and aliases, and the tie if there is one.

    A head that is stored as a copy of the embedding is tied if the config says so.
    """
    tensors = dict(group.tensors)
    for alias, key in group.aliases.items():
        pair = (alias, key) if alias.endswith(HEADS) else (key, alias)
        if pair[0].endswith(HEADS) and pair[1].endswith(EMBEDDINGS):
            tensors[pair[1]] = tensors.pop(key)
            others = {name: target for name, target in group.aliases.items() if name != alias}
            return replace(group, tensors=tensors, aliases=others), TiedHead(*pair, is_alias=True)
    embeddings = [key for key, recipe in tensors.items() if key.endswith(EMBEDDINGS) and len(recipe.shape) == 2]
    tied = is_tied(config)
    if len(embeddings) != 1 or tied is False:
        return group, None
    embedding = embeddings[0]
    head = next((key for key in tensors if key.endswith(HEADS)), None)
    if head is None:
        return group, TiedHead(_head_of(config, embedding), embedding) if _has_head(config, embedding) else None
    if not tied or not is_equal(tensors[head], tensors[embedding]):
        return group, None
    del tensors[head]
    return replace(group, tensors=tensors), TiedHead(head, embedding)


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """Return whether a config ties the head to the embeddings, None if it says nothing."""
    text = config.get("text_config")
    for scope in (config, text if isinstance(text, dict) else {}):
        if isinstance(scope.get(_FIELD), bool):
            return bool(scope[_FIELD])
    return None


def untied_fields(config: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of a config whose head is a tensor of its own."""
    text = config.get("text_config")
    fields: dict[str, object] = {_FIELD: False}
    if isinstance(text, dict) and _FIELD in text:
        fields["text_config"] = {**text, _FIELD: False}
    return fields


def _head_of(config: Mapping[str, Any], embedding: str) -> str:
    """Return the key under which transformers loads the head, empty if it is not certain: a wrong key is not loaded."""
    model_type, names = config.get("model_type"), config.get("architectures") or []
    generates = any(str(name).endswith(_WITH_HEAD) for name in names) if names else embedding in _DECODERS
    if not generates or model_type in _WITH_UNKNOWN_HEADS or ".embeddings." in embedding:
        return ""
    if model_type in _OTHER_HEADS:
        return _OTHER_HEADS[model_type]
    prefix = embedding.partition(_INNER_MODEL)[0] + "language_model." if _INNER_MODEL in embedding else ""
    return f"{prefix}lm_head.weight"


def _has_head(config: Mapping[str, Any], embedding: str) -> bool:
    """Return False for a model that ends at its hidden states, or in a classifier."""
    names = config.get("architectures") or []
    if any(str(name).endswith(_WITHOUT_HEAD) and not str(name).endswith(_WITH_HEAD) for name in names):
        return False
    return embedding.removesuffix(".weight").count(".") > 0


def change_of_tie(tie: TiedHead, adapter: Adapter, spelled: Spelling, is_equal: IsEqual) -> TieChange:
    """Return what an adapter makes of a tie, and drop its copies of what the head shares with the embedding.

    Raises Unsupported for LoRA matrices that are tied, too, and for a head of its own whose key is not known.
    """
    modules = {spelled(f"{module}.weight"): module for module in adapter.modules}
    head_module = modules.get(tie.head)
    products = [module for key, module in modules.items() if key in (tie.head, tie.embedding)]
    products = [module for module in products if adapter.modules[module].parts.keys() - {TOKENS}]
    if adapter.config.ties and head_module in products:
        raise Unsupported(
            f"{adapter.path}: {', '.join(products)} have LoRA matrices that are tied (ensure_weight_tying): PEFT's "
            "merge adds them twice to the weight that both modules share, which is not the model that was trained"
        )
    if head_module is not None and _has_copied_rows(tie, adapter, head_module):
        adapter.drop_copies(head_module)
        head_module = None
    whole = {spelled(target): target for target in adapter.full}
    head, embedding = whole.get(tie.head), whole.get(tie.embedding)
    if head_module is None and head is not None and _is_copied(adapter, head, embedding, is_equal):
        adapter.drop_copies(head.removesuffix(".weight"))
        return TieChange(unties=False, note=_BOTH.format(tie) if products else "")
    is_saved = embedding is not None and adapter.config.saves(embedding)
    if head is None and head_module is None:
        return _change_by_embedding(tie, adapter, is_saved=is_saved, has_products=bool(products))
    note = "" if is_saved or (head is not None and head_module not in products) else _ONLY_HEAD.format(tie)
    return TieChange(unties=head is None, note=note)


def _change_by_embedding(tie: TiedHead, adapter: Adapter, *, is_saved: bool, has_products: bool) -> TieChange:
    """Return what an adapter that leaves the head alone makes of a tie. Raises Unsupported for an unknown head."""
    if is_saved and not tie.head:
        raise Unsupported(_UNKNOWN_HEAD.format(adapter.path, tie.embedding))
    if is_saved:
        return TieChange(unties=True, note=_ONLY_EMBEDDING.format(tie))
    return TieChange(unties=False, note=_BOTH.format(tie) if has_products else "")


def _is_copied(adapter: Adapter, head: str, embedding: str | None, is_equal: IsEqual) -> bool:
    """Return True if the whole tensor of a head was not trained on its own, and equals that of the embedding."""
    if embedding is None or (adapter.config.saves(head) and not adapter.config.ties):
        return False
    return is_equal(adapter.full[head][1], adapter.full[embedding][1])


_ONLY_EMBEDDING = (
    "trains {0.embedding} alone (modules_to_save): {0.head}, which the base ties to it, keeps the base's weight in a "
    "tensor of its own, as PEFT's merge_and_unload makes it"
)
_UNKNOWN_HEAD = (
    "{}: modules_to_save trains {} alone, and the head that the base ties to it would become a tensor of its own, "
    "whose name is not known for this architecture: merge the adapter with PEFT's merge_and_unload"
)
_ONLY_HEAD = (
    "changes {0.head} apart from {0.embedding}: the head becomes a tensor of its own, as in the adapter; PEFT's "
    "merge_and_unload changes the weight that both share"
)
_BOTH = (
    "its change of {0.embedding} is merged into the tied head too, as PEFT's merge_and_unload does it; in the model "
    "that was trained, the head had the base's weight"
)


def _has_copied_rows(tie: TiedHead, adapter: Adapter, head_module: str) -> bool:
    """Return True if trained rows of a tied head are those of the embedding.

    Raises Mismatch if the embedding has none.
    """
    parts = adapter.modules[head_module].parts
    if parts.keys() != {TOKENS}:
        return False
    stated = adapter.config.stated_rows(head_module)
    if stated is not None and stated != adapter.config.rows_of(tie.embedding.removesuffix(".weight")):
        return False
    if not any(TOKENS in own.parts for name, own in adapter.modules.items() if name != head_module):
        raise Mismatch(f"{adapter.path}: {head_module!r} has rows that are tied to the embeddings, which have none")
    return True
