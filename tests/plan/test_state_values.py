"""Values of all ranks become one state.json: equal ones once, others by coordinate, contradictions refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.core.errors import LayoutError
from holdfast.layout.placement import Mesh
from holdfast.plan.state_values import (
    FILE,
    OPTIMIZER,
    PLAN,
    SPLIT_DICT,
    TREE,
    RankValue,
    ValuesChanged,
    merge_files,
    merge_groups,
    merge_plans,
    merge_split_dict,
    merge_values,
    value_fields,
    value_text,
    values_from,
)

DP_TP = Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))


def tree(value: Any, kind: str = "json") -> RankValue:
    return RankValue.of(TREE, [kind, value])


def merged(
    values: list[RankValue | None], axes: tuple[str, ...] = (), mesh: Mesh = DP_TP, keys: tuple[str, ...] = ()
) -> Any:
    everyone = [{} if value is None else {"v": value} for value in values]
    return merge_values(everyone, {"v": axes} if axes else {}, mesh, {"v": keys} if keys else {})["v"]


def test_equal_values_have_equal_digests() -> None:
    assert RankValue.of(TREE, [1, 2]) == RankValue.of(TREE, [1, 2])


def test_kind_content_and_extra_each_change_the_digest() -> None:
    made = [("a", 1, ""), ("b", 1, ""), ("a", 2, ""), ("a", 1, "x"), ("ax", 1, "")]
    assert len({RankValue.of(*each).digest for each in made}) == len(made)


def test_a_value_keeps_its_kind_content_and_text() -> None:
    value = RankValue.of(TREE, {"a": 1})
    assert (value.kind, value.content, value.text) == (TREE, {"a": 1}, b'{"a":1}')


OWN = {"mine": RankValue.of(TREE, ["json", 1]), "theirs": RankValue.of(TREE, ["json", 2])}
REPORTERS = {"theirs": 0}


def test_a_rank_sends_what_no_earlier_rank_reports() -> None:
    assert value_fields(OWN, REPORTERS, 1) == {
        "mine": [TREE, OWN["mine"].digest, 1, ["json", 1]],
        "theirs": [TREE, OWN["theirs"].digest, 0, None],
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_the_text_of_values_is_the_json_of_their_fields(rank: int) -> None:
    without_text = {"plain": RankValue(TREE, ["json", None], "d")}
    values = {**OWN, **without_text}
    assert json.loads(value_text(values, REPORTERS, rank)) == value_fields(values, REPORTERS, rank)


def test_the_text_of_no_values_is_an_empty_object() -> None:
    assert json.loads(value_text({}, {}, 0)) == {}


def test_a_text_that_was_encoded_for_the_digest_is_used_again() -> None:
    assert b'"as it was"' in value_text({"v": RankValue(TREE, "other", "d", b'"as it was"')}, {}, 0)


def test_every_rank_has_its_values_again() -> None:
    other = {"mine": RankValue.of(TREE, ["json", 5]), "theirs": OWN["theirs"]}
    found = values_from([value_fields(other, {}, 0), value_fields(OWN, REPORTERS, 1)])
    contents = [{name: (value.kind, value.digest, value.content) for name, value in own.items()} for own in found]
    wanted = [{name: (v.kind, v.digest, v.content) for name, v in own.items()} for own in (other, OWN)]
    assert contents == wanted


def test_a_value_that_its_reporter_changed_is_noticed() -> None:
    other = {"theirs": RankValue.of(TREE, ["json", 3])}
    with pytest.raises(ValuesChanged, match="'theirs' was the same on ranks 0 and 1"):
        values_from([value_fields(other, {}, 0), value_fields(OWN, REPORTERS, 1)])


def test_a_value_that_its_reporter_no_longer_has_is_noticed() -> None:
    with pytest.raises(ValuesChanged, match="differs now"):
        values_from([{}, value_fields(OWN, REPORTERS, 1)])


def test_a_value_that_is_equal_on_all_ranks_is_stored_once() -> None:
    assert merged([tree(7)] * 4) == {"kind": "json", "value": 7}


def test_ranks_without_a_value_do_not_matter() -> None:
    assert merged([None, tree(7), None, tree(7)]) == {"kind": "json", "value": 7}
    assert merged([None, tree("a"), None, tree("b")], ("dp",))["values"] == {"dp=0": "a", "dp=1": "b"}


def test_a_value_that_differs_along_an_axis_is_stored_by_coordinate() -> None:
    assert merged(
        [tree("a", "stateful"), tree("a", "stateful"), tree("b", "stateful"), tree("b", "stateful")], ("dp",)
    ) == {
        "kind": "stateful",
        "axes": ["dp"],
        "sizes": [2],
        "values": {"dp=0": "a", "dp=1": "b"},
    }


def test_sizes_are_those_of_the_axes_in_their_order() -> None:
    mesh = Mesh(("dp", "tp"), (1, 3), (0, 1, 2))
    found = merged([tree(rank) for rank in range(3)], ("dp", "tp"), mesh)
    assert (found["axes"], found["sizes"]) == (["dp", "tp"], [1, 3])
    assert found["values"] == {"dp=0,tp=0": 0, "dp=0,tp=1": 1, "dp=0,tp=2": 2}


def test_a_value_by_rank_has_as_many_values_as_ranks() -> None:
    assert merged([tree(rank) for rank in range(4)], ("rank",)) == {
        "kind": "json",
        "axes": ["rank"],
        "sizes": [4],
        "values": {f"rank={rank}": rank for rank in range(4)},
    }


def test_ranks_that_no_longer_agree_are_noticed() -> None:
    with pytest.raises(ValuesChanged, match=r"'v' now differs between ranks$"):
        merged([tree(1), tree(1), tree(1), tree(2)])
    with pytest.raises(ValuesChanged, match=r"'v' now differs between ranks at dp=1$"):
        merged([tree(1), tree(1), tree(1), tree(2)], ("dp",))


def test_files_and_plans_are_no_entries_of_the_state() -> None:
    everyone = [{"b": tree(1), "a": tree(2), "file:c": RankValue.of(FILE, "x"), "plan:m": RankValue.of(PLAN, {})}]
    assert list(merge_values(everyone, {}, Mesh.line(1), {})) == ["a", "b"]


def test_each_file_comes_from_the_first_rank_that_has_it() -> None:
    everyone = [
        {"v": tree(1)},
        {"file:config.json": RankValue.of(FILE, "é")},
        {"file:config.json": RankValue.of(FILE, "later"), "file:other": RankValue.of(FILE, "x")},
    ]
    assert merge_files(everyone) == {"config.json": "é".encode(), "other": b"x"}


def test_the_plans_of_all_ranks_are_stored_by_module() -> None:
    a, b = RankValue.of(PLAN, {"a": 1}), RankValue.of(PLAN, {"b": 2})
    found = merge_plans([{"plan:m": b, "v": tree(1)}, {"plan:m": b, "plan:k": a}])
    assert found == {"m": {"b": 2}, "k": {"a": 1}} and list(found) == ["k", "m"]


def test_different_plans_of_a_module_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"^m: ranks placed it by different plans"):
        merge_plans([{"plan:m": RankValue.of(PLAN, {"a": 1})}, {"plan:m": RankValue.of(PLAN, {"a": 2})}])


def split(**values: Any) -> RankValue:
    digests = {key: repr(value) for key, value in values.items()}
    return RankValue.of(SPLIT_DICT, {"kind": "tensors", "digests": digests, "value": values})


def test_the_keys_of_a_split_dict_come_from_all_ranks() -> None:
    assert merged([split(a=1, b=2), None, split(b=2, c=3)]) == {"kind": "tensors", "value": {"a": 1, "b": 2, "c": 3}}


def test_a_key_of_a_split_dict_that_differs_between_ranks_is_noticed() -> None:
    with pytest.raises(ValuesChanged, match="v: 'b' now differs"):
        merge_split_dict("v", [split(a=1, b=2), split(b=4)])


def optimizer(**fields: Any) -> RankValue:
    return RankValue.of(OPTIMIZER, {"groups": [], "stateless": [], "scalars": {}, "masters": None, **fields})


def test_the_answers_of_ranks_become_one_optimizer() -> None:
    group = {"params": ["a"], "options": {"lr": 1}}
    first = optimizer(groups=[group], stateless=["z", "y"], scalars={"a": {"step": 1}})
    second = optimizer(groups=[{**group, "params": ["b"]}], scalars={"b": {"step": 2}}, masters="float32")
    assert merged([first, None, second, first]) == {
        "kind": "optimizer",
        "groups": [{"params": ["a", "b"], "options": {"lr": 1}}],
        "stateless": ["y", "z"],
        "scalars": {"a": {"step": 1}, "b": {"step": 2}},
        "masters": "float32",
    }


def test_an_optimizer_without_masters_says_so() -> None:
    assert merged([optimizer(), optimizer(masters="")])["masters"] is None


def test_a_parameter_with_state_on_any_rank_is_not_stateless() -> None:
    without = optimizer(stateless=["a.w", "b", "c"])
    found = merged([without, optimizer(scalars={"b": {"step": 1}})], keys=("a.w/exp_avg",))
    assert found["stateless"] == ["c"]


def test_different_plain_values_of_a_parameter_are_refused() -> None:
    with pytest.raises(LayoutError, match="v: the state 'step' of a differs between ranks: 1 on one, 2 on another"):
        merged([optimizer(scalars={"a": {"step": 1}}), optimizer(scalars={"a": {"step": 2}})])


def test_groups_of_equal_options_at_the_same_index_become_one() -> None:
    slow, fast = {"lr": 1}, {"lr": 2}
    per_rank = [
        [{"params": ["l.10", "l.2"], "options": slow}, {"params": ["b"], "options": fast}],
        [{"params": ["l.2", "l.9"], "options": slow}, {"params": ["c"], "options": fast}],
    ]
    assert merge_groups("o", per_rank) == [
        {"params": ["l.2", "l.9", "l.10"], "options": slow},
        {"params": ["b", "c"], "options": fast},
    ]


def test_groups_at_different_indices_stay_apart() -> None:
    groups = [{"params": ["a"], "options": {"lr": 1}}, {"params": ["b"], "options": {"lr": 1}}]
    assert merge_groups("o", [groups]) == groups


def test_groups_of_different_options_stay_apart() -> None:
    first, second = {"params": ["a"], "options": {"lr": 1}}, {"params": ["b"], "options": {"lr": 2}}
    assert merge_groups("o", [[first], [second]]) == [first, second]


def test_a_parameter_with_different_options_is_refused_and_the_options_are_named() -> None:
    first = {"params": ["a"], "options": {"lr": 1, "eps": 1, "beta": 1}}
    second = {"params": ["a"], "options": {"lr": 2, "eps": 1, "beta": 3}}
    with pytest.raises(LayoutError, match=r"^o: a has different options \(lr, beta\) on different ranks"):
        merge_groups("o", [[first], [second]])


def test_an_option_that_one_rank_has_and_another_lacks_is_a_different_option() -> None:
    more, fewer = {"params": ["a"], "options": {"lr": 1, "eps": 2}}, {"params": ["a"], "options": {"lr": 1}}
    for ranks in ([[more], [fewer]], [[fewer], [more]]):
        with pytest.raises(LayoutError, match=r"a has different options \(eps\)"):
            merge_groups("o", ranks)
