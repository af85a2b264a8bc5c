"""torch alone against the rules, case by case: what was right must stay right, for no more bytes."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.spmd.base import torch_versions
from tests.spmd.judge import RAISES_TOO
from tests.spmd.raises import reason
from tests.spmd.team import Finding

RAISE_SHARE, TALK_SHARE = 0.02, 0.01
GROWN_SHARE = 0.01  # of what torch alone has right: cases that move more for no reason that is listed
WHOLE = 10_000  # cases that are no slice


@dataclass(frozen=True, slots=True)
class Excuse:
    """Cases that may move more bytes than with torch alone, by how many at most, and the reason."""

    cases: str  # a pattern over the names of cases, in which [ and ] stand for themselves
    bytes: int
    why: str

    def holds(self, theirs: Finding, own: Finding) -> bool:
        pattern = self.cases.replace("[", "[[]")
        return fnmatch.fnmatchcase(str(own.case), pattern) and own.bytes - theirs.bytes <= self.bytes


EXCUSES = (
    Excuse(
        "vector_norm_dim_inf[* 2x2 R,0 *]",
        4 * 8,  # a number for each of 4 columns
        "the gradient counts ties over all shards; torch alone forgets those of other ranks",
    ),
    Excuse(
        "batch_norm_running_grad[* 1 whole]",
        2 * 8 * 8,  # two numbers for each of 8 channels
        "running statistics that are whole are gathered from channel shards; torch alone forgets to update them",
    ),
    Excuse(
        "LBFGS[*]",
        60 * 16,  # three steps of twenty looks, one number over two axes
        "a loss that is a sum is reduced before it is read; torch alone reads each rank's part",
    ),
    Excuse(
        "group_norm[few 4 P follow]",
        24,
        "a weight that is a sum is reduced for the gradient too; torch alone leaves a sum of whole gradients behind",
    ),
    Excuse(
        "cosine_embedding_*[few * 1*]",
        144,
        "of columns fewer than ranks the empty shards stay, and are gathered once more where a sum is added to them",
    ),
    Excuse(
        "amin_keepdim[few 2x2 2,P *]",
        24,
        "a sum is cut along the dim that is searched, and its few extremes are brought together twice",
    ),
    Excuse(
        "cross_entropy_smooth_*[* apart]",
        896,
        "of few classes, beside targets that are cut by the same axis, the sums of rows are more than the classes",
    ),
    Excuse(
        "gather_0[uneven 2x2 0,1 apart]",
        32,
        "each rank looks into its own rows, so that the result is a sum that can be read more than once",
    ),
    Excuse(
        "rms_norm[few *P*]",
        112,
        "a mean that is a sum stays one when eps is added to it in place, which its aliases see; it is reduced later",
    ),
    Excuse(
        "bce_weight_mean[few 4 P *]",
        72,
        "weights that are a sum are reduced for the gradient too, which torch alone leaves a sum",
    ),
)


def spoilt(alone: Sequence[Finding], ours: Sequence[Finding]) -> list[tuple[Finding, Finding]]:
    """Cases that torch alone has right and the rules have not."""
    return [(theirs, own) for theirs, own in _pairs(alone, ours) if theirs.is_right and not own.is_right]


def grown(alone: Sequence[Finding], ours: Sequence[Finding]) -> list[tuple[Finding, Finding]]:
    """Cases that both have right, for which the rules move more bytes; an error may cost what it takes."""
    return [
        (theirs, own)
        for theirs, own in _pairs(alone, ours)
        if theirs.is_right and own.is_right and own.bytes > theirs.bytes and own.detail != RAISES_TOO
    ]


def why_grown(theirs: Finding, own: Finding) -> str | None:
    """Why a case may move so much more than with torch alone."""
    return next((excuse.why for excuse in EXCUSES if excuse.holds(theirs, own)), None)


def unexplained(alone: Sequence[Finding], ours: Sequence[Finding]) -> list[str]:
    """What moves more for no listed reason, if it is more than a few; most of it are small inputs that lie apart."""
    more = [own for theirs, own in grown(alone, ours) if why_grown(theirs, own) is None]
    right = sum(finding.is_right for finding in alone)
    return [f"more bytes than with torch alone: {own}" for own in more] if len(more) > _most(GROWN_SHARE, right) else []


def _pairs(alone: Sequence[Finding], ours: Sequence[Finding]) -> list[tuple[Finding, Finding]]:
    found = {finding.case: finding for finding in alone}
    return [(found[own.case], own) for own in ours if own.case in found]


def failures(ours: Sequence[Finding]) -> list[str]:
    """What the matrix does not allow, in words: anything wrong, any hang, and more than a few that raise or talk."""
    problems = [str(finding) for finding in ours if finding.outcome in ("wrong", "hang")]
    raised = [finding for finding in ours if finding.outcome == "raise"]
    problems += [f"raises without a reason: {finding}" for finding in raised if not reason(finding.case.operation)]
    talks = sum(finding.outcome == "talk" for finding in ours)
    if len(raised) > _most(RAISE_SHARE, len(ours)):
        problems.append(f"{len(raised)} of {len(ours)} cases raise: more than {RAISE_SHARE:.0%}")
    if torch_versions.AT_LEAST_2_13 and talks > _most(TALK_SHARE, len(ours)):  # older strategies of torch gather more
        problems.append(f"{talks} of {len(ours)} cases move more than the table declares: more than {TALK_SHARE:.0%}")
    return problems


def _most(share: float, cases: int) -> float:
    """How many of so many cases may be so: a share of the whole matrix, and of a slice what chance may put into it."""
    return share * cases if cases >= WHOLE else share * cases + 3 * math.sqrt(share * cases)
