"""How an embedding model makes a vector of a text: pooling, attention, prompts, normalization, lengths. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.core.errors import InvalidArgument

POOLINGS = ("lasttoken", "mean", "cls")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # the names that the hub's models use, in this order


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSettings:
    """How the hidden states of a text become its vector, in the words of sentence-transformers.

    Args:
        pooling: "lasttoken", "mean" or "cls", the first token.
        causal: If False, every token attends to all others. True makes a decoder of the trainer causal, and leaves
            what the config of a model of transformers says.
        include_prompt: If False, the tokens of the prompt do not take part in pooling.
        normalize: Scale vectors to length one.
        prompts: Texts by name that are put in front of others: "query" and "document" for the two sides.
        default_prompt: The name of the prompt of texts that belong to no side.
        max_length: The number of tokens after which a text is cut; None for the tokenizer's own.
        dims: The lengths that Matryoshka training makes useful, recorded in config.json for servers.
        truncate_dim: `encode` returns only so many of the vector's first numbers; the loss gets all.
        similarity: By what vectors are compared: "cosine", "dot", "euclidean" or "manhattan".
    """

    pooling: str = "lasttoken"
    causal: bool = True
    include_prompt: bool = True
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    dims: tuple[int, ...] = ()
    truncate_dim: int | None = None
    similarity: str = "cosine"

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", dict(self.prompts))
        object.__setattr__(self, "dims", tuple(self.dims))
        for name, choices in (("pooling", POOLINGS), ("similarity", SIMILARITIES)):
            if getattr(self, name) not in choices:
                raise InvalidArgument(f"embedding {name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        texts = [*self.prompts, *self.prompts.values()]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidArgument(f"embedding prompts={self.prompts!r}: give texts by name")
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            known = ", ".join(self.prompts) or "there are none"
            raise InvalidArgument(f"embedding default_prompt={self.default_prompt!r} is not a name in prompts: {known}")
        counts = {"max_length": self.max_length, "truncate_dim": self.truncate_dim}
        numbers = [(name, value) for name, value in counts.items() if value is not None]
        for name, value in [*numbers, *(("dims", dim) for dim in self.dims)]:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"embedding {name}={value!r} must be an integer of at least 1")

    def prompt(self, name: str | None) -> str:
        """Return the prompt of a name or a side, "" if it has none; None is the default prompt.

        Documents take the prompt "document" or else "passage" or "corpus", whichever the model has.
        """
        if name is None:
            return "" if self.default_prompt is None else self.prompts[self.default_prompt]
        names = _DOCUMENT_PROMPTS if name == "document" else (name,)
        found = next((self.prompts[known] for known in names if known in self.prompts), None)
        if found is None and name not in ("query", "document"):
            raise InvalidArgument(f"prompt {name!r}: the model has {', '.join(self.prompts) or 'no prompts'}")
        return found or ""

    def check_width(self, width: int) -> None:
        """Raise InvalidArgument if a model with vectors of this width cannot have these dims."""
        for name, dims in (("dims", self.dims), ("truncate_dim", (self.truncate_dim or 1,))):
            if max(dims, default=1) > width:
                raise InvalidArgument(f"embedding {name}={max(dims)} is more than the {width} numbers of a vector")
