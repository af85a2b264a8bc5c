"""load_state_dict and state_dict code: run post-hooks after a load, refuse other custom code before load or save.

A load writes tensors in place and does not call load_state_dict of modules and optimizers. Code that would
rename, convert or derive values there must not be skipped silently. Code of torch, and of libraries that
only rename keys of old checkpoints, has no effect if the keys match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys, _WrappedHook

from holdfast.adapters.module import clean_key
from holdfast.core.errors import Unsupported

# Reviewed: with matching keys, the load code of these packages changes nothing, or works in place as well.
_TRUSTED = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "torchmetrics")
_BY_HAND = (
    "load into copies and assign them: tensors = {k: v.clone() for k, v in module.state_dict().items() "
    "if isinstance(v, torch.Tensor)}, "
    "holdfast.load(path, {NAME: tensors}), module.load_state_dict(tensors)"
)


def check_module(name: str, root: nn.Module, inner: nn.Module, takes: Callable[[str], bool]) -> None:
    """Raise Unsupported for a module with load code that would be skipped, if the load selects any of its keys.

    `takes` receives the path of a submodule and returns True if any of its keys is selected.
    """
    for path, part, what, code in _module_code(root, inner):
        if not takes(path):
            continue
        label = f"{name}: {path or 'the module'} ({type(part).__name__})"
        ignored = f"{path}.*" if path else name
        raise Unsupported(
            f"{label} has {what}, {_qualified_name(code)}, which a load does not run because it fills the tensors in "
            f"place. Exclude its keys with ignore=[{ignored!r}], or {_BY_HAND.replace('NAME', repr(name))}"
        )


def _module_code(root: nn.Module, inner: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield the untrusted code that torch's load would run: path, module, description and code."""
    paths = dict(inner.named_modules(remove_duplicate=False))
    known = set(map(id, paths.values()))
    wrappers = [part for part in root.modules() if id(part) not in known]
    for part in (*wrappers, inner):
        code = _override(part, "load_state_dict", nn.Module)
        if code is not None:
            yield "", part, "a load_state_dict of its own", code
    for raw_path, part in (*(("", part) for part in wrappers), *paths.items()):
        path = clean_key(raw_path)
        code = _override(part, "_load_from_state_dict", nn.Module)
        if code is not None:
            yield path, part, "a _load_from_state_dict of its own", code
        for hook in part._load_state_dict_pre_hooks.values():
            if not _is_trusted(hook):
                yield path, part, "a load_state_dict pre-hook", hook


def has_post_hooks(root: nn.Module) -> bool:
    return any(part._load_state_dict_post_hooks for part in root.modules())


def run_post_hooks(root: nn.Module, missing: Iterable[str], unexpected: Iterable[str]) -> tuple[list[str], list[str]]:
    """Run the hooks of register_load_state_dict_post_hook in torch's order; returns the keys they leave."""
    keys = _IncompatibleKeys(list(missing), list(unexpected))

    def visit(part: nn.Module) -> None:
        for child in part._modules.values():
            if child is not None:
                visit(child)
        for hook in list(part._load_state_dict_post_hooks.values()):
            if hook(part, keys) is not None:
                raise Unsupported(
                    f"the load_state_dict post-hook {_qualified_name(hook)} returned a value; it must change the keys "
                    "in place"
                )

    visit(root)
    return keys.missing_keys, keys.unexpected_keys


def check_optimizer_load(name: str, optimizer: Any) -> None:
    """Raise Unsupported for an optimizer whose load_state_dict does more than torch's."""
    for part in _layers(optimizer):
        code = _override(part, "load_state_dict", torch.optim.Optimizer)
        what = "a load_state_dict of its own"
        for hook in getattr(part, "_optimizer_load_state_dict_pre_hooks", {}).values():
            if code is None and not _is_trusted(hook):
                code, what = hook, "a load_state_dict pre-hook"
        if code is not None:
            raise Unsupported(
                f"{name}: the optimizer {type(part).__name__} has {what}, {_qualified_name(code)}, which a load does "
                f"not run because it fills the state in place. {_WRAP.format(name=name)}"
            )


_WRAP = (
    "Exclude it with ignore=[{name!r}], or save and load it through your own object with the "
    "optimizer's state_dict and load_state_dict (such an object is stored as it is, not resharded)"
)


def run_optimizer_post_hooks(optimizer: Any) -> None:
    """Run the hooks of Optimizer.register_load_state_dict_post_hook."""
    for part in _layers(optimizer):
        for hook in list(getattr(part, "_optimizer_load_state_dict_post_hooks", {}).values()):
            hook(part)


def has_optimizer_post_hooks(optimizer: Any) -> bool:
    return any(getattr(part, "_optimizer_load_state_dict_post_hooks", None) for part in _layers(optimizer))


def has_plain_state_dict(optimizer: Any) -> bool:
    """Return True if the state_dict of an optimizer is torch's own, without hooks."""
    for part in _layers(optimizer):
        hooks = [getattr(part, f"_optimizer_state_dict_{when}_hooks", {}) for when in ("pre", "post")]
        if any(hooks) or _override(part, "state_dict", torch.optim.Optimizer, trust=False) is not None:
            return type(part).__name__ == "ZeroRedundancyOptimizer"
    return True


def check_optimizer_save(name: str, optimizer: Any) -> None:
    """Raise Unsupported if an optimizer's state_dict differs from its state and param_groups.

    Runs state_dict hooks as torch does.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or has_plain_state_dict(optimizer):
        return
    problem = _difference(optimizer, optimizer.state_dict())
    if problem:
        raise Unsupported(
            f"{name}: the optimizer {type(optimizer).__name__} overrides state_dict, and {problem}, which would be "
            f"lost. {_WRAP.format(name=name)}"
        )


def _difference(optimizer: Any, state_dict: Any) -> str:
    """Describe how a state_dict differs from the optimizer's state and param_groups; "" if it does not."""
    if not isinstance(state_dict, Mapping) or set(state_dict) != {"state", "param_groups"}:
        held = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else [type(state_dict).__name__]
        return f"it holds {', '.join(held[:6])} instead of state and param_groups"
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state_dict = _unpacked(state_dict, optimizer)
    known = {index: optimizer.state[param] for index, param in enumerate(params) if param in optimizer.state}
    if {index for index, own in state_dict["state"].items() if own} != {index for index, own in known.items() if own}:
        return "it holds the state of other parameters"
    for index, own in known.items():
        stored = state_dict["state"].get(index, {})
        tensors = [state for state in own if torch.is_tensor(own[state])]
        if set(stored) != set(own) or any(stored[state] is not own[state] for state in tensors):
            return f"its state of parameter {index} differs"
    options = [[option for option in group if option != "params"] for group in optimizer.param_groups]
    if [[option for option in group if option != "params"] for group in state_dict["param_groups"]] != options:
        return "its param_groups have other options"
    return ""


def _unpacked(state_dict: Mapping[str, Any], optimizer: Any) -> Mapping[str, Any]:
    """Return a state_dict without the inner dict in which bitsandbytes hides its tensors from FSDP1."""
    packed = getattr(optimizer, "_FSDP_WRAPPED_QUANT_STATE_KEY", None)
    if packed is None:
        return state_dict
    states = {
        index: {**{name: value for name, value in own.items() if name != packed}, **own.get(packed, {})}
        for index, own in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _layers(optimizer: Any) -> list[Any]:
    """Return an optimizer and the optimizer it wraps, as accelerate's and ZeroRedundancyOptimizer do."""
    inner = [getattr(optimizer, "optim", None), getattr(optimizer, "optimizer", None)]
    return [optimizer, *(part for part in inner if isinstance(part, torch.optim.Optimizer))]


def _override(owner: Any, method: str, base: type, *, trust: bool = True) -> Any:
    """Return the code that overrides a method of torch's base class; None without an untrusted override."""
    own = getattr(owner, "__dict__", {}).get(method)
    if own is None:
        own = getattr(type(owner), method, None)
        if own is getattr(base, method):
            return None
    return None if trust and _is_trusted(own) else own


def _is_trusted(code: Any) -> bool:
    package = str(getattr(_unwrapped(code), "__module__", "")).partition(".")[0]
    return package in _TRUSTED


def _unwrapped(code: Any) -> Any:
    """Return the function inside partials and torch's hook wrappers."""
    while isinstance(code, partial | _WrappedHook):
        code = code.func if isinstance(code, partial) else code.hook
    return code


def _qualified_name(code: Any) -> str:
    code = _unwrapped(code)
    name = getattr(code, "__qualname__", None) or type(code).__qualname__
    return f"{getattr(code, '__module__', '?')}.{name}"
