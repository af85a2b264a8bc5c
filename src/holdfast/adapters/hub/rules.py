"""transformers' conversion rules run on tensors without data: names on the hub of a model's tensors, and the reverse.

`save_pretrained` reverts the rules that loaded a model, or those of its class. Its own function for this is
called here, so that the names are those that it writes. transformers is imported by no one but the model:
this module finds it in `sys.modules`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.adapters.hub.traced_tensor import TracedTensor, TracedValue, UntracedOperation
from holdfast.adapters.huggingface import PlainClasses, adapter_kind
from holdfast.adapters.module import is_pretrained

Shapes = Mapping[str, tuple[int, ...]]
_RULES, _LOADING = "transformers.conversion_mapping", "transformers.core_model_loading"


def is_convertible(module: nn.Module) -> bool:
    """Return True for a transformers model whose files have names by its own rules: no adapters, not quantized."""
    return is_pretrained(module) and not adapter_kind(module) and getattr(module, "hf_quantizer", None) is None


def has_rules(module: nn.Module) -> bool:
    """Return True if transformers may give a model's tensors other names when it saves them."""
    if not is_convertible(module):
        return False
    try:
        return bool(_saving_rules(module))
    except Exception:  # noqa: BLE001  (code of other models; deriving the names reports it)
        return True


def _saving_rules(module: Any) -> list[Any]:
    """Return the rules that save_pretrained reverts."""
    try:
        loading = importlib.import_module(_LOADING)
        rules = importlib.import_module(_RULES)
    except ImportError:  # before version 5, names in memory are those on the hub
        return []
    own = getattr(module, "_weight_conversions", None)
    if own is not None:
        return list(own)
    found = rules.get_model_conversion_mapping(PlainClasses(module), add_legacy=False)
    return [rule for rule in found if not isinstance(rule, loading.PrefixChange)]


def names_on_hub(module: Any, shapes: Shapes) -> dict[str, TracedValue]:
    """Return what save_pretrained writes for tensors of these shapes, traced. Raises UntracedOperation."""
    loading = importlib.import_module(_LOADING)
    sources = {key: TracedTensor.source(key, shape) for key, shape in shapes.items()}
    stand_in = _StandIn(module, shapes)
    # Rules keep notes of what they matched: fresh copies leave the model's own alone.
    stand_in._weight_conversions = copy.deepcopy(getattr(module, "_weight_conversions", None))
    if stand_in._weight_conversions is None:
        stand_in._weight_conversions = _traced(lambda: _saving_rules(module))
    found = _traced(lambda: loading.revert_weight_conversion(stand_in, sources))
    return {key: _value(key, tensor) for key, tensor in found.items()}


def _value(key: str, tensor: Any) -> TracedValue:
    if not isinstance(tensor, TracedTensor):
        raise UntracedOperation(f"a new tensor for {key}")
    return tensor.value


def _traced(run: Any) -> Any:
    """Run rules; whatever they raise becomes UntracedOperation, because nothing can be said about the names then."""
    try:
        return run()
    except UntracedOperation:
        raise
    except Exception as error:
        raise UntracedOperation(f"{type(error).__name__}: {error}") from error


class _StandIn:
    """A model for the rules: its attributes, and its tensors by shape only, whatever layout this rank has of them."""

    def __init__(self, module: Any, shapes: Shapes) -> None:
        self._module = module
        self._shapes = shapes
        self._weight_conversions: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def get_parameter(self, key: str) -> TracedTensor:
        if key not in self._shapes:
            raise AttributeError(key)
        return TracedTensor.source(key, self._shapes[key])

    get_parameter_or_buffer = get_parameter


def names_in_memory(module: Any, stored: Shapes, live: Shapes) -> dict[str, TracedValue]:
    """Return what from_pretrained makes of stored tensors of these shapes, traced, by the keys in memory.

    Stored keys that it would report as unexpected are left out. Raises UntracedOperation.
    """
    loading, rules = _traced(lambda: (importlib.import_module(_LOADING), importlib.import_module(_RULES)))
    found = _traced(lambda: rules.get_model_conversion_mapping(PlainClasses(module)))
    renamings = [rule for rule in found if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in found if isinstance(rule, loading.WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    stand_in = _StandIn(module, live)
    known = {key: shape or (1,) for key, shape in live.items()}
    pending: dict[str, Any] = {}

    def collect() -> dict[str, Any]:
        for key in sorted(stored, key=loading.dot_natural_key):
            target, pattern = loading.rename_source_key(key, renamings, converters, module.base_model_prefix, known)
            if target not in live and key in live:
                target, pattern = loading.rename_source_key(key, [], [], module.base_model_prefix, known)
            if target not in live:
                continue
            if target not in pending:
                renaming = pattern is None
                pending[target] = (
                    loading.WeightRenaming(key, target) if renaming else copy.deepcopy(of_pattern[pattern])
                )
            source = TracedTensor.source(key, stored[key])
            pending[target].add_tensor(target, key, key if pattern is None else pattern, source)
        out = {}
        for target, rule in pending.items():
            for key, tensor in rule.convert(target, model=stand_in, config=module.config).items():
                out[key] = tensor[0] if isinstance(tensor, list) else tensor
        return out

    made = _traced(collect)
    return {key: _value(key, tensor) for key, tensor in made.items() if key in live}
