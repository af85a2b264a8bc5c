"""Enums and options in Megatron's args, which every checkpoint of it names: enums become text, options records."""

from __future__ import annotations

from typing import Any

from holdfast.sources.pickles import Names, records
from holdfast.sources.pickles.values import Builder

_MODULES = ("megatron.core.enums", "megatron.enums", "megatron.model.enums", "megatron.legacy.model.enums")
_ENUMS = ("ModelType", "LayerType", "AttnType", "AttnMaskType")
_TEXT = 100


def _enum(name: str) -> Builder:
    """Return a builder of text: a member's value if that is text, else the class with the value."""

    def text(arguments: tuple[Any, ...]) -> str:
        (value,) = arguments
        if type(value) not in (int, str):
            raise TypeError("not the value of a member")
        return value[:_TEXT] if isinstance(value, str) else f"{name}({value})"

    return text


def _enums(module: str, *names: str) -> dict[tuple[str, str], Builder | None]:
    return {(module, name): _enum(name) for name in names}


MEGATRON: Names = {
    **{key: builder for module in _MODULES for key, builder in _enums(module, *_ENUMS).items()},
    **_enums("megatron.core.enums", "Fp8Recipe", "Fp4Recipe"),
    **_enums("megatron.core.transformer.enums", *_ENUMS, "AttnBackend"),
    **_enums("megatron.core.transformer.enums", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope"),
    **_enums("megatron.core.rerun_state_machine", "RerunDiagnostic", "RerunMode", "RerunState"),
    **_enums("signal", "Signals"),
    **records("types", "SimpleNamespace"),
    **records("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
}
