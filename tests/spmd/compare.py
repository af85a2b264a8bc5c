"""torch alone against the rules, case by case: what was right must stay right, for no more bytes."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence

from tests.spmd.raises import reason
from tests.spmd.team import Finding

from holdfast.spmd import torch_private as private

GROWS = {
    "clip_grad_norm_inf_*": "the largest of each tensor is reduced at once: one number more",
    "cosine_* triplet_* corrcoef linalg.matrix_norm": "a norm that is compared with is reduced at once",
    "mm_double_backward": "an empty shard is kept empty, and its gradient gathered",
}
PARTIAL = "a Partial is reduced into shards, padded where they are uneven, for each use; torch alone reduces it once"
RAISE_SHARE, TALK_SHARE = 0.02, 0.01


def spoilt(alone: Sequence[Finding], ours: Sequence[Finding]) -> list[tuple[Finding, Finding]]:
    """Cases that torch alone has right and the rules have not."""
    return [(theirs, own) for theirs, own in _pairs(alone, ours) if theirs.is_right and not own.is_right]


def grown(alone: Sequence[Finding], ours: Sequence[Finding]) -> list[tuple[Finding, Finding]]:
    """Cases that both have right, for which the rules move more bytes."""
    return [
        (theirs, own)
        for theirs, own in _pairs(alone, ours)
        if theirs.is_right and own.is_right and own.bytes > theirs.bytes
    ]


def why_grown(own: Finding) -> str | None:
    """Why a case may move a little more than with torch alone."""
    for patterns, why in GROWS.items():
        if any(fnmatch.fnmatchcase(own.case.operation, pattern) for pattern in patterns.split()):
            return why
    return PARTIAL if "P" in own.case.first else None


def _pairs(alone: Sequence[Finding], ours: Sequence[Finding]) -> list[tuple[Finding, Finding]]:
    found = {finding.case: finding for finding in alone}
    return [(found[own.case], own) for own in ours if own.case in found]


def failures(ours: Sequence[Finding]) -> list[str]:
    """What the matrix does not allow, in words: anything wrong, any hang, and more than a few that raise or talk."""
    problems = [str(finding) for finding in ours if finding.outcome in ("wrong", "hang")]
    raised = [finding for finding in ours if finding.outcome == "raise"]
    problems += [f"raises without a reason: {finding}" for finding in raised if not reason(finding.case.operation)]
    talks = sum(finding.outcome == "talk" for finding in ours)
    if len(raised) > math.ceil(RAISE_SHARE * len(ours)):
        problems.append(f"{len(raised)} of {len(ours)} cases raise: more than {RAISE_SHARE:.0%}")
    if private.AT_LEAST_2_13 and talks > math.ceil(TALK_SHARE * len(ours)):  # older strategies of torch gather more
        problems.append(f"{talks} of {len(ours)} cases move more than the table declares: more than {TALK_SHARE:.0%}")
    return problems
