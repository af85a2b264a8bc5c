"""The grammar: every form is read and printed, what is malformed is refused with line and column."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError, InvalidArgument
from holdfast.format.dtypes import dtype_named
from holdfast.mapping import Mapping
from holdfast.mapping.syntax.statement import Hole, Key, Options, Statement


def one(text: str) -> Statement:
    (statement,) = Mapping.parse([text]).statements
    return statement


def keys(*names: str) -> tuple[Key, ...]:
    return tuple(Key((name,)) for name in names)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a -> b", Statement(keys("a"), keys("b"))),
        ("a->b", Statement(keys("a"), keys("b"))),
        ("a-b-->c-d", Statement(keys("a-b-"), keys("c-d"))),
        ("0.w -> 1/x", Statement(keys("0.w"), keys("1/x"))),
        ('\'a b\' -> "c\\"d\\\\"', Statement(keys("a b"), keys('c"d\\'))),
        ("'$X.*' -> '_'", Statement(keys("$X.*"), keys("_"))),
        ("a -> _", Statement(keys("a"), ())),
        ("_ -> z", Statement((), keys("z"))),
        ("a , b->c,axis = 1", Statement(keys("a", "b"), keys("c"), Options(axis=1))),
        ("a, b -> c, axis=-1, sizes=[8, 4]", Statement(keys("a", "b"), keys("c"), Options(axis=-1, sizes=(8, 4)))),
        ("a -> b, permute='[2,0,1]'", Statement(keys("a"), keys("b"), Options(permute=(2, 0, 1)))),
        ("a -> b, permute=[1, 0]", Statement(keys("a"), keys("b"), Options(permute=(1, 0)))),
        ('a -> b, permute = "[]"', Statement(keys("a"), keys("b"), Options(permute=()))),
        ("a -> b, dtype='bfloat16'", Statement(keys("a"), keys("b"), Options(dtype=dtype_named("bfloat16")))),
        ("a -> fused_ffn2", Statement(keys("a"), keys("fused_ffn2"))),
        ("axis -> dtype", Statement(keys("axis"), keys("dtype"))),
        ("w -> w2, fused_ffn", Statement(keys("w"), keys("w2"), Options(fused="fused_ffn"))),
        ("w -> w2, optional, axis=0", Statement(keys("w"), keys("w2"), Options(axis=0, optional=True))),
        ("a^T -> b", Statement((Key(("a",), None, True),), keys("b"))),
        ("'a b'^T -> b^T", Statement((Key(("a b",), None, True),), (Key(("b",), None, True),))),
        ("c -> x[0:3], axis=0", Statement(keys("c"), (Key(("x",), (0, 3)),), Options(axis=0))),
        ("e.*.w -> f, axis=0", Statement((Key(("e.", Hole("*"), ".w")),), keys("f"), Options(axis=0))),
        (
            "m.$LAYER_ID.w -> n.$X, axis=0",
            Statement((Key(("m.", Hole("LAYER_ID"), ".w")),), (Key(("n.", Hole("X"))),), Options(axis=0)),
        ),
        (
            "m.$LAYER_ID_OFFSET -> n.$LAYER_ID_OFFSET",
            Statement((Key(("m.", Hole("LAYER_ID"))),), (Key(("n.", Hole("LAYER_ID", -1))),)),
        ),
        (
            "m.${LAYER_ID+2}x -> n.${LAYER_ID}9",
            Statement((Key(("m.", Hole("LAYER_ID", 2), "x")),), (Key(("n.", Hole("LAYER_ID"), "9")),)),
        ),
        ("'we ird'.$L.w -> b.$L", Statement((Key(("we ird.", Hole("L"), ".w")),), (Key(("b.", Hole("L"))),))),
        ("q, k, v -> w, fused_qkv, num_heads=4, num_key_value_groups = 2", None),
        ("w -> q, k, v, fused_qkv_old, num_heads=4, num_key_value_groups=2, tp_degree=2, axis=0", None),
        ("a -> b, src_dtype='bfloat16', dst_dtype='float32'", None),
        ("f -> e.*.w, axis=0, parts=8, sizes=equal", None),
        ("f -> a, b, axis=0, sizes=targets", None),
    ],
)
def test_statements_are_read_and_printed(text: str, wanted: Statement | None) -> None:
    statement = one(text)
    if wanted is not None:
        assert statement == wanted
    assert one(str(statement)) == statement


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "line 1, column 2.*expected ->, found 'end of line'"),
        ("-> b", "line 1, column 1.*expected word, found '->'"),
        ("a -> b -> c", "line 1, column 8"),
        ("a b -> c", "line 1, column 3.*expected ->, found 'b'"),
        ("a -> b,", "line 1, column 8"),
        ("a,, b -> c", "line 1, column 3"),
        ("a -> b c", "separated by commas"),
        ("a -> b, c=1", "'c' is not an option; the options are fused_ffn"),
        ("a -> b, axis=1, c", "'c' is not an option"),
        ("a -> b, axis", "axis= needs a value"),
        ("a -> b, axis=1, axis=2", "line 1, column 17.*axis appears twice"),
        ("a, b -> c, fused_ffn, fused_qkv", "one fused form"),
        ("a -> b, axis=x", "axis=x is not an integer"),
        ("a -> b, axis='1'", "axis=1 is not an integer"),
        ("a -> b, axis=1.5", "axis=1.5 is not an integer"),
        ("a -> b, axis=99999999999999999999", "is not an integer"),
        ("f -> e.*, axis=0, parts=0", "parts=0 is not positive"),
        ("a -> b, permute=[0, 0]", "is not a permutation of the dims"),
        ("a -> b, permute=[1]", "is not a permutation of the dims"),
        ("a -> b, permute='x'", "is not a list of integers"),
        ("a -> b, dtype=[1]", "takes one value"),
        ("a -> b, dtype='complex128'", "elements cannot be cast to a dtype stored as float64"),
        ("a -> b, dtype='float32', src_dtype='float32', dst_dtype='float32'", "either dtype= or"),
        ("a -> b, src_dtype='float32'", "must be used together"),
        ("_ -> _", "has no effect"),
        ("a, _ -> b, axis=0", "`_` must be alone"),
        ("a -> b, _", "`_` must be alone"),
        ("a^T -> _", "nothing to transpose"),
        ("a -> _, axis=1", "takes no option except optional"),
        ("a^T^T -> b", "line 1, column 4"),
        ("a^X -> b", r"unexpected '\^'"),
        ("a b{ -> b", "unexpected '{'"),
        ("${a} -> b", "is not an id"),
        ("$x -> b", "is not an id"),
        ("a$ -> b", "is not an id"),
        ("'a -> b", "an unclosed quote"),
        ("'' -> b", "at least one character"),
        ("a.*.*-> b, axis=0", "at most one \\*"),
        ("a$X$Y -> b.$X.$Y", "two holes must be separated"),
        ("a$X.1*2$Y -> b", "two holes must be separated"),
        ("a, b -> c", "axis= is missing: along which dim are the parts joined"),
        ("a -> b, c", "axis= is missing: along which dim are the parts split"),
        ("a -> b.*", "axis= is missing"),
        ("a, b -> c, d, axis=0", "only one side"),
        ("a.* -> b.*, axis=0", "use an id such as"),
        ("a -> b, sizes=[1]", "sizes= needs several"),
        ("a, b -> c, axis=0, sizes=targets", "needs a split"),
        ("a -> b, parts=2", "parts= needs a"),
        ("a -> b, num_heads=2", "needs a fused form"),
        ("a, b, c -> w, fused_ffn", "fused_ffn is written `gate, up -> w, fused_ffn`"),
        ("w -> w2, fused_qkv, num_heads=2, num_key_value_groups=1", "fused_qkv is written"),
        ("q, k, v -> w, fused_qkv", "needs num_heads="),
        ("a, b -> w, fused_ffn, num_heads=2", "takes no num_heads"),
        ("q, k, v -> w, fused_qkv, num_heads=4, num_key_value_groups=3", "is not a multiple of"),
        (
            "q, k, v -> w, fused_qkv, num_heads=4, num_key_value_groups=2, tp_degree=2",
            "does not depend",
        ),
        ("e.*, u -> w, fused_ffn", "no \\* and no arrays"),
        ("g, u -> w, fused_ffn, sizes=[1, 2]", "takes neither sizes= nor parts="),
        ("g, u -> w, fused_ffn, src_tp_degree=2", "for a fused source"),
        ("w -> g, u, fused_ffn, dst_tp_degree=2", "for a fused target"),
        ("w -> g, u, fused_ffn, src_tp_degree=2, tp_degree=2", "either tp_degree= or src_tp_degree="),
        ("c -> x[3:3], axis=0", "has no members"),
        ("c -> x[0:999999999], axis=0", "more than the limit"),
        ("c -> x[0-3], axis=0", "an array is written"),
        ("c -> x[a:3], axis=0", "is not a number"),
    ],
)
def test_what_is_malformed_is_refused_where_it_stands(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s)mapping, .*{message}"):
        Mapping.parse([text])


def test_lines_comments_and_continuations() -> None:
    program = Mapping.parse(
        "# a comment\n\na -> b  # another\r\n\tc,\n  d ->\n e, axis=0,\n sizes=[1,\n 2]\n'x # y' -> z\n"
    )
    assert [(s.line, s.column) for s in program.statements] == [(3, 1), (4, 2), (9, 1)]
    assert program.statements[1] == one("c, d -> e, axis=0, sizes=[1, 2]")
    assert program.statements[2].lefts == keys("x # y")
    assert program.statements[0].text == "a -> b"
    with pytest.raises(InvalidArgument, match="line 5, column 3"):
        Mapping.parse("a -> b\n\n\n\nc d\n")


def test_an_id_that_everybody_knows_ends_where_it_ends() -> None:
    assert one("h$LAYER_ID_norm -> b$LAYER_ID_norm").lefts[0].pieces == ("h", Hole("LAYER_ID"), "_norm")
    assert one("$LAYER_IDS -> b$LAYER_ID").lefts[0].pieces == (Hole("LAYER_ID"), "S")
    assert one("$MY_IDx -> b$MY_ID").lefts[0].pieces == (Hole("MY_ID"), "x")


MARKS = "ab_.$*-/^T[]:,=>'\"\\#{}0123 \n\té\0"
ALPHABET = st.sampled_from([*MARKS, "->", "$LAYER_ID", "axis=", "fused_ffn"])


@pytest.mark.slow
@settings(max_examples=1500)
@given(st.one_of(st.text(max_size=60), st.lists(ALPHABET, max_size=30).map("".join)))
def test_any_text_is_read_or_refused_and_prints_as_it_reads(text: str) -> None:
    try:
        mapping = Mapping.parse([text])
    except HoldfastError:
        return
    assert Mapping.parse(str(mapping)) == mapping
