"""Load requests for tensor subclasses: compare the stored description with the live one, request what is inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from holdfast.adapters.block_layout import BLOCK_CLASSES
from holdfast.adapters.loading.findings import Findings
from holdfast.adapters.subclass_context import differences
from holdfast.adapters.subclass_tensors import SubclassView, is_subclass, own_shard, sharded_axes, view_subclass
from holdfast.adapters.tensors import Holder
from holdfast.adapters.weight_wrappers import local_tensor
from holdfast.plan.contents import Contents, StoredTensor
from holdfast.plan.subclass_keys import StoredSubclasses


class HolderRequests(Protocol):
    """Requests for plain tensors: `LoadRequests` of wants.py."""

    contents: Contents
    findings: Findings

    def request_holder(self, group: str, key: str, holder: Holder, source: StoredTensor, text: str) -> bool: ...


_SHOWN = 4  # differences in a message


def request_subclass(requests: HolderRequests, group: str, key: str, value: Any, stored: StoredSubclasses) -> bool:
    """Request the tensors inside a live tensor subclass; returns False and records a finding if they do not fit."""
    text, findings = f"{group}: {key}", requests.findings
    description = stored.descriptions.get(key)
    if description is None:
        source = requests.contents.find(group, key)
        if source is None:
            findings.missing.append(text)
            return False
        findings.wanted.append(f"{group}: {source.key}")
        findings.mismatched.append(
            f"{text}: stored as a plain {source.logical} tensor, but the live one is the tensor subclass "
            f"{_kind(value)}{_hint(_kind(value))}"
        )
        return False
    findings.wanted += [f"{group}: {inner}" for inner in stored.inner_of(key)]
    if not is_subclass(value):
        if isinstance(value, torch.Tensor) and list(value.shape) == description.get("shape"):
            if _is_empty_shard(value):
                return True  # other ranks hold all of its elements
            if description.get("axes") and description["axes"] == sharded_axes(value):
                view = SubclassView({}, [own_shard(value, key, text)])
                return _request_inner(requests, group, view, text)
        hint = _hint(str(description.get("class")))
        findings.mismatched.append(f"{text}: {_stored_as(description)}, but the live one is {_plain_text(value)}{hint}")
        return False
    view = view_subclass(value, key, text, by_coordinate=bool(description.get("axes")))
    problem = _misfit(description, view.description)
    if problem:
        findings.mismatched.append(f"{text}: {problem}")
        return False
    return _request_inner(requests, group, view, text)


def request_without_live(requests: HolderRequests, group: str, key: str, stored: StoredSubclasses, why: str) -> None:
    """Report a stored tensor subclass for which there is no live tensor to take the class from."""
    requests.findings.wanted += [f"{group}: {inner}" for inner in stored.inner_of(key)]
    requests.findings.mismatched.append(f"{group}: {key}: {_stored_as(stored.descriptions[key])}, but {why}")


def _request_inner(requests: HolderRequests, group: str, view: SubclassView, text: str) -> bool:
    fits = True
    for inner in view.inner:
        source = requests.contents.find(group, inner.key)
        if source is None:
            requests.findings.missing.append(f"{group}: {inner.key}")
            fits = False
            continue
        if source.logical != inner.holder.logical.name:
            requests.findings.mismatched.append(
                f"{group}: {inner.key}: the dtype differs: stored {source.logical}, live {inner.holder.logical.name}; "
                f"the tensors inside of a tensor subclass are not cast"
            )
            fits = False
            continue
        fits = requests.request_holder(group, inner.key, inner.holder, source, text) and fits
    return fits


def _misfit(stored: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """Describe how a stored subclass differs from the live one; "" if the tensors inside fit."""
    if stored.get("class") != live["class"]:
        return f"{_stored_as(stored)}, but the live one is a {live['class']}"
    if stored.get("shape") != live["shape"]:
        return f"the shape differs: stored {stored.get('shape')}, live {live['shape']}"
    if stored.get("axes") != live.get("axes"):
        return (
            f"each coordinate has a {live['class']} of its own, as its blocks did not fit the shards: saved with "
            f"{_axes_text(stored)}, live {_axes_text(live)}; load it on the mesh that saved it"
        )
    found = list(differences(stored, live))
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"the {live['class']} differs: {'; '.join(found[:_SHOWN])}{more}" if found else ""


def _axes_text(description: Mapping[str, Any]) -> str:
    axes = description.get("axes") or {}
    return " ".join(f"{axis}={size}" for axis, size in axes.items()) or "shards of whole blocks"


def _stored_as(description: Mapping[str, Any]) -> str:
    return f"stored as the tensor subclass {description.get('class')} of shape {description.get('shape')}"


def _kind(value: Any) -> str:
    return type(local_tensor(value)).__name__ if isinstance(value, torch.Tensor) else type(value).__name__


def _is_empty_shard(value: torch.Tensor) -> bool:
    return bool(value.numel()) and not local_tensor(value).numel()


def _plain_text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    local = local_tensor(value)
    shard = f" of which this rank holds {local.numel()} elements" if local.numel() != value.numel() else ""
    return f"a plain {str(local.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}{shard}"


def _hint(kind: str) -> str:
    """Return how a state can be loaded that torchao quantizes on one layout and not on another."""
    if kind not in BLOCK_CLASSES:
        return "; quantize the live model as the saved one was, or load into plain tensors and quantize those"
    return (
        "; torchao quantizes a state only where a rank holds at least 4096 elements and whole blocks of it, so that "
        "this depends on the layout; with the same optimizer, pass cast=True to convert"
    )
