"""Surveys: one layout for all ranks, replicas compared once, differences found."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.adapters.saving import agreement as agreement_module
from holdfast.core.ranks import SingleProcess
from holdfast.engine.options import SaveOptions
from holdfast.engine.survey import Survey, Surveyor
from tests.engine.ranks import ThreadRanks, on_ranks


def surveyed(state: dict[str, Any], **options: Any) -> Survey:
    return Surveyor(SaveOptions(**options)).survey(SingleProcess(), state, "here")


def test_a_survey_lists_tensors_and_values() -> None:
    survey = surveyed({"model": nn.Linear(3, 2), "note": {"lr": 0.5}})
    assert sorted(survey.agreement.tensors) == [("model", "bias"), ("model", "weight")]
    assert survey.agreement.tensors["model", "weight"].shape == (2, 3)
    assert survey.values["note"].content == ["json", {"lr": 0.5}]
    assert survey.first_replica == ()
    assert [item.key for item in survey.collected.items] == ["weight", "bias"]


def test_model_dtype_adds_master_weights() -> None:
    survey = surveyed({"model": nn.Linear(3, 2)}, model_dtype="bfloat16")
    assert {group for group, _ in survey.agreement.tensors} == {"model", "master_weights"}
    assert survey.agreement.tensors["model", "bias"].dtype.name == "bfloat16"
    assert survey.agreement.tensors["master_weights", "bias"].dtype.name == "float32"


def test_replicas_are_compared_when_tensors_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compare = agreement_module.differing_replicas

    def counted(*args: Any) -> Any:
        calls.append(1)
        return compare(*args)

    monkeypatch.setattr(agreement_module, "differing_replicas", counted)
    surveyor = Surveyor(SaveOptions())
    one, two = {"w": torch.ones(3)}, {"w": torch.ones(3), "v": torch.ones(2)}
    for state, compared in ((one, 1), (one, 1), (two, 2), (two, 2), (one, 3)):
        surveyor.survey(SingleProcess(), dict(state), "here")
        assert len(calls) == compared


def test_ranks_agree_on_one_layout() -> None:
    def survey(ranks: ThreadRanks) -> tuple[str, int, str]:
        state = {"w": torch.ones(4), "rank": ranks.rank}
        found = Surveyor(SaveOptions()).survey(ranks, state, "here")
        return found.agreement.digest, len(found.agreement.hosts), found.values["rank"].digest

    (first, hosts, value), (second, _, other) = on_ranks(2, survey)
    assert first == second and hosts == 2
    assert value != other, "values are this rank's own"


def test_replicas_that_differ_are_an_error_or_the_first_counts() -> None:
    def survey(ranks: ThreadRanks, replicas: str) -> Any:
        surveyor = Surveyor(SaveOptions(replicas=replicas))
        state = {"model": nn.Linear(2, 2)}
        with torch.no_grad():
            state["model"].weight.fill_(float(ranks.rank))
            state["model"].bias.fill_(1.0)
        return surveyor, surveyor.survey(ranks, state, "here").first_replica

    with pytest.raises(holdfast.LayoutError, match="weight"):
        on_ranks(2, lambda ranks: survey(ranks, "error"))
    found = on_ranks(2, lambda ranks: survey(ranks, "first"))
    assert [first for _, first in found] == [(("model", "weight"),)] * 2
    with pytest.warns(holdfast.HoldfastWarning, match="model: weight"):
        found[0][0].warn(SingleProcess())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found[0][0].warn(SingleProcess())  # once is enough


def test_shapes_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(holdfast.LayoutError, match="w"):
        on_ranks(2, lambda ranks: Surveyor(SaveOptions()).survey(ranks, {"w": torch.ones(3 + ranks.rank)}, "here"))


def test_every_tensor_of_this_rank_must_be_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(agreement: agreement_module.Agreement, name: tuple[str, str]) -> None:
        if name == ("model", "bias"):
            raise holdfast.LayoutError("no rank holds row 1 of model: bias")

    monkeypatch.setattr(agreement_module.Agreement, "holding", refuse)
    with pytest.raises(holdfast.LayoutError, match="model: bias"):
        Surveyor(SaveOptions()).survey_layout(SingleProcess(), {"model": nn.Linear(3, 2)}, "here")
