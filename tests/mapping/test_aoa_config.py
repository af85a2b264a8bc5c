"""AOA configs as Paddle's develop and PaddleFormers write them: a dict whose other keys say how to read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.core.warnings import HoldfastWarning
from holdfast.mapping import Mapping
from tests.mapping.arrays import numbered, run, same, spec_of, specs_of

A, B = numbered((4, 6)), numbered((4, 6), begin=100)


def config(*statements: str, **more: Any) -> dict[str, Any]:
    return {"aoa_statements": list(statements), **more}


def test_a_reversed_config_undoes_its_statements() -> None:
    forward = config("a^T, b^T -> t, axis=1", "t -> c, permute='[1, 0]'")
    there = run(forward, {"a": A, "b": B})
    assert same(there, {"c": np.concatenate([A, B])})
    assert same(run({**forward, "aoa_config_reverse": True}, there, specs_of({"a": A, "b": B})), {"a": A, "b": B})
    assert same(run({**forward, "aoa_config_reverse": False}, {"a": A, "b": B}), there)


def test_a_reversed_config_cuts_by_the_shapes_of_the_targets_and_else_evenly_as_paddle_does() -> None:
    reverse = config("a, b -> c, axis=0", aoa_config_reverse=True)
    whole = numbered((6, 6))
    uneven = {"a": spec_of(whole[:2]), "b": spec_of(whole[2:])}
    assert same(run(reverse, {"c": whole}, uneven), {"a": whole[:2], "b": whole[2:]})
    assert same(run(reverse, {"c": whole}), {"a": whole[:3], "b": whole[3:]})


def test_a_reversed_cast_needs_both_dtypes() -> None:
    both = config("a -> b, src_dtype='float32', dst_dtype='bfloat16'", aoa_config_reverse=True)
    assert run(both, {"b": A.astype(ml_dtypes.bfloat16)})["a"].dtype == np.float32
    with pytest.raises(InvalidArgument, match=r"line 1.*no inverse: dtype='bfloat16' does not give the dtype"):
        Mapping.parse(config("a -> b, dtype='bfloat16'", aoa_config_reverse=True))


def test_keys_of_a_config_that_say_nothing_about_tensors() -> None:
    assert same(run(config("a -> b", enable_traceback=True), {"a": A}), {"b": A})
    with pytest.warns(HoldfastWarning, match="unknown AOA config entry 'note' was ignored"):
        assert same(run(config("a -> b", note="ours"), {"a": A}), {"b": A})
    with pytest.raises(InvalidArgument, match=r"'aoa_config_revers'.*did you mean 'aoa_config_reverse'\?"):
        Mapping.parse(config("a -> b", aoa_config_revers=True))
    with pytest.raises(InvalidArgument, match="aoa_config_reverse must be True or False, not 'yes'"):
        Mapping.parse(config("a -> b", aoa_config_reverse="yes"))


def test_a_config_is_read_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    path.write_text(json.dumps(config("a -> b", aoa_config_reverse=True)))
    assert str(Mapping.parse(path)).startswith("b -> a")


def test_a_load_and_a_save_take_a_config(tmp_path: Path) -> None:
    forward = config("w^T -> linear.weight", "nothing.$LAYER_ID.w -> linear.$LAYER_ID.weight")
    module: Any = torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 2, bias=False)})
    value = torch.arange(6.0).reshape(3, 2)
    holdfast.save(tmp_path / "a", {"model": {"w": value}})
    holdfast.load(tmp_path / "a", {"model": module}, mapping=forward)
    assert torch.equal(module["linear"].weight, value.T)
    holdfast.save(tmp_path / "b", {"model": module}, mapping=forward | {"aoa_config_reverse": True})
    assert torch.equal(torch.from_numpy(holdfast.open(tmp_path / "b").read("w")), value)


def test_statements_of_a_config_may_match_nothing() -> None:
    program = config("a -> b", "layers.$LAYER_ID.x -> y.$LAYER_ID", "gone -> _", "p, q -> r, axis=0", "_ -> not.there")
    assert same(run(program, {"a": A}, {"b": spec_of(A)}), {"b": A})
    with pytest.raises(Mismatch, match="no key matches layers"):
        run(program["aoa_statements"][1:2], {"a": A})


def test_a_config_of_which_nothing_matches_warns() -> None:
    with pytest.warns(HoldfastWarning, match=r"none of the 2 statements matches a source.*'x\.\$LAYER_ID'.*'a'"):
        assert same(run(config("x.$LAYER_ID -> y.$LAYER_ID", "b -> c"), {"a": A}), {"a": A})


def test_a_key_that_is_missing_beside_others_is_refused_in_a_config_too() -> None:
    with pytest.raises(Mismatch, match=r"'p' exists, but not q"):
        run(config("p, q -> r, axis=0"), {"p": A})


def test_parts_that_nothing_uses_are_dropped_from_a_config() -> None:
    program = config("a -> b, c, axis=0")
    assert same(run(program, {"a": A}, {"b": spec_of(A[:2])}), {"b": A[:2]})
    told = Mapping.parse(program).explain({"a": (4, 6)}, {"b": (2, 6)})
    assert "dropped: c, which line 1, column 1 makes and nothing uses" in told


def test_a_part_that_nothing_uses_is_refused_where_a_target_is_missing() -> None:
    """Then the name may be misspelt: what Paddle drops in silence, `mapping.md` lists as its eighth mistake."""
    with pytest.raises(
        Mismatch, match=r"'model\.nrom\.weight' is not a target.*misspelt\?; similar names: 'model\.norm"
    ):
        run(config("a -> model.nrom.weight"), {"a": A}, {"model.norm.weight": spec_of(A)})


def test_outside_of_a_config_the_message_says_how_to_drop_a_part() -> None:
    with pytest.raises(Mismatch, match=r"'c' is not a target.*if it is not wanted, add `c -> _`"):
        run("a -> b, c, axis=0", {"a": A}, {"b": spec_of(A[:2])})
    assert same(run("a -> b, c, axis=0\nc -> _", {"a": A}, {"b": spec_of(A[:2])}), {"b": A[:2]})
