"""The tree of keys: numbered neighbors that look alike become one entry, at every depth; nothing else does."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.tensor_tree import TreeRow, state_rows, tree_lines
from holdfast.core.names import natural_key


def lines(*rows, unfold=False):
    return list(
        tree_lines([row if isinstance(row, TreeRow) else TreeRow(row, "float32[2]", 8) for row in rows], unfold=unfold)
    )


def test_experts_in_layers_are_folded_at_both_depths():
    keys = [f"l.{layer}.e.{expert}.w" for layer in range(3) for expert in range(4)]
    assert lines(*keys) == [
        "  l",
        "    0-2  (3 alike)",
        "      e",
        "        0-3  (4 alike)",
        "          w  float32[2]  8 B",
    ]


def test_tensors_that_are_numbers_are_folded_too():
    assert lines("p.0", "p.1", "p.3") == [
        "  p",
        "    0-1  float32[2]  8 B  (2 alike)",
        "    3  float32[2]  8 B",
    ]


def test_other_dtypes_sizes_remarks_and_names_are_not_alike():
    rows = [
        TreeRow("l.0.w", "float32[2]", 8),
        TreeRow("l.1.w", "bfloat16[2]", 4),
        TreeRow("l.2.w", "bfloat16[2]", 4, "  scaled"),
        TreeRow("l.3.v", "bfloat16[2]", 4, "  scaled"),
    ]
    assert not [line for line in lines(*rows) if "alike" in line]


def test_the_states_of_a_parameter_are_one_row():
    states = {"exp_avg": ("float32[2]", 8), "exp_avg_sq": ("float32[2]", 8), "step": ("float32[]", 4)}
    rows = [TreeRow(f"l.{n}.w/{name}", *state) for n in range(2) for name, state in states.items()]
    assert lines(*state_rows([*rows, TreeRow("one/step", "float32[]", 4)])) == [
        "  l",
        "    0-1  (2 alike)",
        "      w  exp_avg, exp_avg_sq float32[2]; step float32[]  20 B",
        "  one/step  float32[]  4 B",
    ]
    scaled = [TreeRow("w/a", "uint8[2]", 2, "  scaled"), TreeRow("w/b", "uint8[2]", 2)]
    assert state_rows(scaled) == scaled


def test_a_very_deep_key_is_printed():
    deep = ".".join("a" for _ in range(5000))
    assert lines(deep)[-1].endswith("  float32[2]  8 B")


KEYS = st.sets(
    st.lists(st.sampled_from(["a", "0", "1", "2", "10", "x1"]), min_size=1, max_size=5).map(".".join), max_size=30
)


@given(KEYS)
def test_unfolded_every_tensor_has_a_line_and_folded_none_is_lost(keys):
    rows = [TreeRow(key, "float32[2]", 8) for key in sorted(keys, key=natural_key)]
    assert sum("float32[2]" in line for line in lines(*rows, unfold=True)) == len(keys)
    depth_times: list[tuple[int, int]] = []
    total = 0
    for line in lines(*rows):
        depth = len(line) - len(line.lstrip())
        depth_times = [(at, times) for at, times in depth_times if at < depth]
        times = int(line.rpartition("(")[2].removesuffix(" alike)")) if line.endswith("alike)") else 1
        if "float32[2]" in line:
            product = times
            for _, above in depth_times:
                product *= above
            total += product
        else:
            depth_times.append((depth, times))
    assert total == len(keys), Counter(keys)
