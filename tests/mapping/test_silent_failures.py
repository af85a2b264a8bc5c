"""What AOA gets wrong in silence: each is done right or refused, with the line, the keys and the shapes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.mapping import Mapping
from holdfast.mapping.optimizer_state import Scalar, map_state
from tests.mapping.arrays import made, numbered, run, same, spec_of, specs_of

A = numbered((4, 6))
BF16 = np.dtype(ml_dtypes.bfloat16)


def test_1_one_source_to_two_targets_fills_both() -> None:
    found = run(
        "embed -> model.embed\nembed -> lm_head", {"embed": A}, {"model.embed": spec_of(A), "lm_head": spec_of(A)}
    )
    assert same(found, {"model.embed": A, "lm_head": A})


def test_1_tied_weights_as_paddle_writes_them() -> None:
    assert same(run("embed -> embed\nembed -> lm_head", {"embed": A}), {"embed": A, "lm_head": A})


def test_2_two_targets_with_different_transforms_of_one_source() -> None:
    program = "a^T -> b\na -> c, dtype='bfloat16'\na -> d, permute='[0, 1]'"
    assert same(run(program, {"a": A}), {"b": A.T, "c": A.astype(BF16), "d": A})


def test_3_a_cast_of_a_parameter_does_not_touch_its_moments() -> None:
    compiled = Mapping.parse("a^T -> b, dtype='bfloat16'").compile({"a": spec_of(A)})
    assert compiled.recipes["b"].dtype.name == "bfloat16"
    moment = numbered((4, 6), begin=5000) / 3
    recipe = map_state(compiled, {"a": spec_of(moment)})["b"]
    assert not isinstance(recipe, Scalar)
    assert made(recipe, {"a": moment})[0].tobytes() == np.ascontiguousarray(moment.T).tobytes()


@pytest.mark.parametrize("name", ["float", "bfloat", "float1", "16", "bf16", "BFLOAT16", "float32 ", "xfloat16", ""])
def test_4_a_dtype_name_is_checked_exactly(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"line 1, column 14.*is not a dtype.*such as"):
        Mapping.parse(f"a -> b,dtype='{name}'")


def test_4_bfloat16_is_rounded_not_reinterpreted() -> None:
    values = np.array([[1.0, 0.1, -3.14159, 65504.0, 1e30]], np.float32)
    found = run("a -> b, dtype='bfloat16'\na -> c, dtype='float16'", {"a": values})
    assert same({"b": found["b"]}, {"b": values.astype(BF16)})
    with np.errstate(over="ignore"):
        assert same({"c": found["c"]}, {"c": values.astype(np.float16)})


def test_5_concat_of_parts_with_other_dims_unequal_is_refused() -> None:
    with pytest.raises(Mismatch, match=r"line 1, column 1: `a, b -> c, axis=0`.*'a' \[4, 6\], 'b' \[4, 5\]"):
        run("a, b -> c, axis=0", {"a": A, "b": numbered((4, 5))})


def test_5_concat_of_two_dtypes_is_refused() -> None:
    with pytest.raises(Mismatch, match="one dtype, not float32 and float64"):
        run("a, b -> c, axis=0", {"a": A, "b": A.astype(np.float64)})


def test_5_a_target_larger_than_its_source_is_refused() -> None:
    targets = {"b": spec_of(numbered((8, 6)))}
    with pytest.raises(Mismatch, match=r"line 1.*'b' has the shape \[8, 6\], but its sources give \[4, 6\]"):
        run("a -> b", {"a": A}, targets)


def test_5_a_target_of_the_same_name_and_another_shape_is_refused() -> None:
    with pytest.raises(Mismatch, match=r"'a' has the shape \[6, 4\], but its sources give \[4, 6\].*no statement"):
        run("", {"a": A}, {"a": spec_of(A.T)})


def test_5_a_split_that_does_not_come_out_even_is_refused() -> None:
    with pytest.raises(Mismatch, match=r"'a' \[4, 6\] along axis 1 does not split into 4 equal parts; add sizes="):
        run("a -> b, c, d, e, axis=1", {"a": A})
    with pytest.raises(Mismatch, match=r"sizes=\[2, 3\] sum to 5, but 'a' \[4, 6\] along axis 1 has 6"):
        run("a -> b, c, axis=1, sizes=[2, 3]", {"a": A})


def test_6_ids_that_match_nothing_are_refused() -> None:
    with pytest.raises(
        Mismatch, match=r"line 2.*no key matches layer\.\$LAYER_ID\.w; similar names: 'layers\.0\.w'.*optional"
    ):
        run("\nlayer.$LAYER_ID.w -> b.$LAYER_ID", {"layers.0.w": A})
    assert same(run("layer.$LAYER_ID.w -> b.$LAYER_ID, optional", {"a": A}), {"a": A})


def test_6_ids_with_a_star_collect_for_every_id() -> None:
    arrays = {
        f"m.{layer}.e.{e}.w": numbered((2, 3), begin=100 * layer + 10 * e) for layer in (0, 1) for e in (9, 10, 1)
    }
    found = run("m.$LAYER_ID.e.*.w -> n.$LAYER_ID, axis=0", arrays)
    wanted = {f"n.{n}": np.concatenate([arrays[f"m.{n}.e.{e}.w"] for e in (1, 9, 10)]) for n in (0, 1)}
    assert same(found, wanted)


def test_6_ids_on_a_temporary() -> None:
    arrays = {f"m.{layer}": numbered((2, 3), begin=100 * layer) for layer in (0, 1, 11)}
    found = run("m.$LAYER_ID^T -> t.$LAYER_ID\nt.$LAYER_ID -> n.$LAYER_ID.w", arrays)
    assert same(found, {f"n.{layer}.w": arrays[f"m.{layer}"].T for layer in (0, 1, 11)})


def test_7_ragged_experts_are_joined_by_their_ids_not_multiplied() -> None:
    arrays = {
        f"m.{layer}.e.{e}": numbered((2, 3), begin=50 * layer + 9 * e)
        for layer, n in ((0, 1), (1, 3))
        for e in range(n)
    }
    found = run("m.$LAYER_ID.e.$EXPERT_ID -> n.$LAYER_ID.x.$EXPERT_ID", arrays)
    assert same(found, {key.replace("m.", "n.").replace(".e.", ".x."): array for key, array in arrays.items()})


def test_7_a_key_that_is_missing_for_one_id_is_named() -> None:
    arrays = {f"m.{layer}.{part}": A for layer in (0, 1) for part in ("g", "u")}
    del arrays["m.1.u"]
    with pytest.raises(Mismatch, match=r"'m\.1\.g' exists, but not m\.1\.u"):
        run("m.$LAYER_ID.g, m.$LAYER_ID.u -> n.$LAYER_ID, axis=0", arrays)
    with pytest.raises(Mismatch, match=r"'m\.1\.g' exists, but not m\.1\.u"):
        run("m.$LAYER_ID.g, m.$LAYER_ID.u -> n.$LAYER_ID, axis=0, optional", arrays)


def test_8_a_misspelt_target_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        Mismatch, match=r"'model\.nrom\.weight' is not a target.*misspelt\?; similar names: 'model\.norm\.weight'"
    ):
        run("n -> model.nrom.weight", {"n": A}, {"model.norm.weight": spec_of(A), "other": None})


def test_8_a_misspelt_source_is_refused_with_the_nearest() -> None:
    with pytest.raises(Mismatch, match=r"no key matches model\.nrom; similar names: 'model\.norm'"):
        run("model.nrom -> b", {"model.norm": A})


def test_8_a_remove_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(Mismatch, match=r"no key matches lm_haed to remove; similar names: 'lm_head'"):
        run("lm_haed -> _", {"lm_head": A})
    assert same(run("lm_haed -> _, optional", {"lm_head": A}), {"lm_head": A})


def test_8_an_add_of_an_unknown_target_is_refused() -> None:
    with pytest.raises(Mismatch, match=r"no target matches lm_haed; similar names: 'lm_head'"):
        run("_ -> lm_haed", {}, {"lm_head": None})


def test_9_more_tp_ranks_than_key_value_heads() -> None:
    size, heads, groups, degree = 2, 8, 2, 4
    q, k, v = (
        numbered((3, heads * size)),
        numbered((3, groups * size), begin=100),
        numbered((3, groups * size), begin=200),
    )
    options = f"fused_qkv_old, num_heads={heads}, num_key_value_groups={groups}, tp_degree={degree}"
    ranks = []
    for rank in range(degree):
        head = slice(rank // 2 * size, (rank // 2 + 1) * size)  # two ranks share a key and value head
        ranks += [q[:, rank * 4 : rank * 4 + 4], k[:, head], v[:, head]]
    fused = np.concatenate(ranks, 1)
    assert same(run(f"q, k, v -> w, {options}", {"q": q, "k": k, "v": v}), {"w": fused})
    assert same(run(f"w -> q, k, v, {options}", {"w": fused}), {"q": q, "k": k, "v": v})
    back = Mapping.parse(f"q, k, v -> w, {options}").reverse().compile(specs_of({"w": fused}))
    assert made(back.recipes["k"], {"w": fused})[1] == k.size  # of the replicas, only the first is read
