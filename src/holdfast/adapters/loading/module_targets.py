"""Load into modules: tensors, weights tied in memory but stored apart, extra states; call their post-hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from holdfast.adapters.hooks import check_module, has_post_hooks, run_post_hooks
from holdfast.adapters.live_state import LiveState
from holdfast.adapters.loading.computed_buffers import compute_buffers, meta_modules
from holdfast.adapters.loading.optimizer_targets import Action
from holdfast.adapters.loading.tree_targets import decode_references
from holdfast.adapters.loading.value_targets import StateEntries
from holdfast.adapters.loading.wants import LoadRequests
from holdfast.adapters.module import is_below, non_persistent_buffers, set_extra_state
from holdfast.adapters.tree import unflatten
from holdfast.adapters.weight_wrappers import PLAIN, forget_scale, has_scale
from holdfast.core.errors import Unsupported

_NOT_COMPUTED = (
    "on the meta device, no checkpoint holds it, and neither reset_parameters() nor _init_weights(module) of a model "
    "around it computes it; give its module a reset_parameters(), or exclude it with ignore and make it yourself"
)


@dataclass(frozen=True, slots=True)
class Incompatible:
    """Missing and unexpected keys, which post-hooks of modules receive and may change."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class ModuleTargets:
    """Destinations of modules' tensors, and the actions that assign extra states and run post-hooks.

    `not_stored` are the buffers that no checkpoint contains; `loaded` the modules whose extra states are
    loaded. `incompatible` must be set before the actions run.
    """

    def __init__(self, live: LiveState, requests: LoadRequests, entries: StateEntries) -> None:
        self._live = live
        self._requests = requests
        self._entries = entries
        self.actions: list[Action] = []
        self.loaded: list[str] = []
        self.notes: list[str] = []
        self.not_stored: list[str] = []
        self.incompatible = Incompatible()

    def find(self, name: str) -> None:
        view = self._live.modules[name]
        choice, findings = self._requests.choice, self._requests.findings
        seen: set[tuple[str, int]] = set()
        taken: list[str] = []
        for key, tensor in view.tensors.items():
            stored = view.stored_key(key)
            chosen = choice.selects(name, stored, *view.aliases_of(stored))
            if chosen and key != stored:
                findings.wanted.append(f"{name}: {key}")  # other tools store tied weights twice
            if chosen:
                taken.append(key)
            if not chosen or (stored, id(tensor)) in seen:
                continue
            if key in view.copies:
                raise Unsupported(
                    f"{name}: {key} in the module's state_dict is a copy, so a load cannot reach the module's tensor; "
                    "exclude it with ignore, and load it by hand"
                )
            seen.add((stored, id(tensor)))
            self._requests.request_parameter(name, key, stored, tensor)
            if type(tensor) not in PLAIN and has_scale(tensor):
                self.actions.append(partial(forget_scale, tensor))
        self._find_untied(name, taken)
        extras = [key for key in view.extra if choice.selects(name, key)]
        findings.wanted += [f"{name}: {key}" for key in extras]
        if extras:
            self._find_extra(name, extras)
        taken += extras
        if taken:
            in_module = [view.module_key(key) for key in taken]
            check_module(name, view.outer, view.module, partial(_takes_below, in_module, view.module_keys))
            self.not_stored += [f"{name}: {key}" for key in non_persistent_buffers(view)]
        self._find_left_on_meta(name)
        if taken and has_post_hooks(view.outer):
            self.actions.append(partial(self._run_post_hooks, name))

    def _find_left_on_meta(self, name: str) -> None:
        """Compute the buffers on the meta device that no checkpoint holds, and report what stays there."""
        view, meta = self._live.modules[name], self._requests.meta
        choice, findings = self._requests.choice, self._requests.findings
        stored = {id(tensor) for tensor in view.tensors.values()}
        for owner in meta_modules(view.module):
            left = {own: tensor for own, tensor in owner.tensors() if not meta.is_used(tensor)}
            chosen = [own for own in left if id(left[own]) not in stored and choice.selects(name, owner.key(own))]
            buffers = [own for own in chosen if own in owner.module._buffers]
            made = compute_buffers(owner, buffers, meta) if buffers else {}
            for own, tensor in left.items():
                text = f"{name}: {owner.key(own)}"
                if own in made:
                    meta.use(tensor, made[own])
                    findings.computed.append(text)
                    continue
                findings.on_meta.append(text)
                if own in chosen:
                    findings.mismatched.append(f"{text}: {_NOT_COMPUTED}")
            self.not_stored[:] = [text for text in self.not_stored if text not in findings.computed]

    def _find_untied(self, name: str, taken: Sequence[str]) -> None:
        """Request both stored tensors of weights that are tied now; the shared memory fits only equal values."""
        view, contents = self._live.modules[name], self._requests.contents
        for key, stored in ((key, view.stored_key(key)) for key in taken):
            if key == stored:
                continue
            own, kept = contents.find(name, key), contents.find(name, stored)
            if own is not None and kept is not None and own.key != kept.key:
                self._requests.request_parameter(name, key, key, view.tensors[key])

    def _run_post_hooks(self, name: str) -> None:
        """Run the module's post-hooks as torch does after a load; they may change the incompatible keys."""
        mark = f"{name}: "
        kinds = [self.incompatible.missing, self.incompatible.unexpected]
        own = [[text.removeprefix(mark) for text in texts if text.startswith(mark)] for texts in kinds]
        for texts, keys in zip(kinds, run_post_hooks(self._live.modules[name].outer, *own), strict=True):
            texts[:] = [text for text in texts if not text.startswith(mark)] + [mark + key for key in keys]

    def _find_extra(self, name: str, extras: Sequence[str]) -> None:
        findings = self._requests.findings
        if name not in self._requests.contents.state:
            findings.missing += [f"{name}: {key}" for key in extras]
            return
        entry = self._entries.value(name)
        if entry is None:
            return
        value, suffix = {key: item for key, item in entry[0].items() if key in extras}, entry[1]
        findings.missing += [f"{name}: {key}" for key in extras if key not in value]
        tensors = self._entries.new_tensors(name, value, suffix, {})
        if tensors is None or not value:
            return
        self.loaded.append(name)
        view = self._live.modules[name]
        self.notes += self._requests.compare_types(decode_references(value, name), dict(view.extra), name)

        def assign() -> None:
            for key, extra in unflatten(value, tensors, name, dict(view.extra)).items():
                set_extra_state(view, key, extra)

        self.actions.append(assign)


def _takes_below(taken: Sequence[str], keys: Sequence[str], path: str) -> bool:
    """Return True if keys of a submodule are loaded; a submodule whose path matches no key may own any."""
    return any(is_below(key, path) for key in taken) or not any(is_below(key, path) for key in keys)
