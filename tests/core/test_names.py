"""Names of keys, groups, files and folders: allowed or refused, and in natural order."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import Damaged, Unsupported
from holdfast.core.names import (
    abandoned_folder,
    case_collision,
    check_case_collisions,
    check_file,
    check_group,
    check_key,
    damaged_folder,
    folder_step,
    index_file,
    is_holdfast_name,
    is_plain,
    is_tensor_file,
    iteration_step,
    key_problem,
    manifest_attempt,
    natural_key,
    set_aside_kind,
    set_aside_step,
    step_folder,
    tensor_file,
)

PLAIN = [
    "model-00001-of-00003.safetensors",
    "model.safetensors.index.json",
    "holdfast.json",
    "_private",
    "a",
    "a..b",
    "console.json",
    "auxiliary",
    "com10",
    "ema/model-00001-of-00001.safetensors",
    "n" * 200,
]
HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "a/..",
    "a/../b",
    "ema/../../x",
    "a/b/c",
    "/etc/passwd",
    "//x",
    "a/",
    "/",
    "a//b",
    ".hidden",
    "ema/.hidden",
    "-rf",
    "a\\b",
    "..\\x",
    "C:\\x",
    "C:x",
    "%2e%2e/x",
    "a%00",
    "a\0b",
    "a\nb",
    "a\n",
    "\na",
    "a\tb",
    "a b",
    "a\x1b[31m",
    "a\u202eb",
    "\uff0e\uff0e/x",
    "mod\u00e8le",
    "\u0661",
    "~",
    "$HOME",
    "a*",
    "a:b",
    "n" * 201,
    "n" * 300,
    "con",
    "NUL",
    "aux.json",
    "Lpt9.tar.gz",
    "ema/com1",
    "prn/model",
]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_names_pass(name):
    assert is_plain(name)
    check_file(name, "run/step")


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_are_not_plain_are_damage(name):
    assert not is_plain(name)
    with pytest.raises(Damaged, match=r"run/step: .* is not an allowed file name"):
        check_file(name, "run/step")


def test_the_message_quotes_control_characters_and_is_short():
    with pytest.raises(Damaged) as caught:
        check_file("\x1b[2J" + "x" * 10_000, "w")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_names_that_differ_only_by_case_are_twins():
    assert case_collision(["a", "b", "a/b"]) is None
    assert case_collision(["ema/a", "b", "EMA/A"]) == ("ema/a", "EMA/A")
    with pytest.raises(Damaged, match=r"run: the file names 'a\.json' and 'A\.json' differ only by case"):
        check_case_collisions(["a.json", "A.json"], "run")


def test_natural_order_counts_digit_runs_as_integers():
    numbers = [0, 2, 9, 10, 11, 100]
    keys = {f"layers.{number}.w{part}" for number in numbers for part in (1, 3, 20)}
    assert sorted(keys, key=natural_key) == [f"layers.{number}.w{part}" for number in numbers for part in (1, 3, 20)]


def test_equal_numbers_are_ordered_by_their_bytes():
    assert sorted(["a1", "a01", "a001"], key=natural_key) == ["a001", "a01", "a1"]
    assert sorted(["a1b01", "a01b1"], key=natural_key) == ["a01b1", "a1b01"]


def test_text_is_ordered_by_utf8_bytes_and_not_by_locale():
    assert sorted(["é", "z", "Z", "a", "字"], key=natural_key) == ["Z", "a", "z", "é", "字"]


ARABIC_2, ARABIC_10 = "\u0662", "\u0661\u0660"


def test_only_ascii_digits_are_numbers():
    assert sorted([ARABIC_2, ARABIC_10], key=natural_key) == [ARABIC_10, ARABIC_2]


def test_numbers_and_names_mix_as_people_expect():
    keys = ["layers.10.weight", "layers.2.weight", "layers.10.bias", "norm", "embed"]
    assert sorted(keys, key=natural_key) == [
        "embed",
        "layers.2.weight",
        "layers.10.bias",
        "layers.10.weight",
        "norm",
    ]


def slow_parts(key):
    return [int(part) if part.isdigit() else part for part in re.split(rb"([0-9]+)", key.encode())]


@given(st.lists(st.text(alphabet="ab.019", max_size=8), unique=True))
def test_natural_order_is_total_and_agrees_with_a_slow_reading(keys):
    ordered = sorted(keys, key=natural_key)
    for first, second in pairwise(ordered):
        assert (slow_parts(first), first.encode()) < (slow_parts(second), second.encode())


@pytest.mark.parametrize(
    "key", ["a", "model.layers.0.weight", "../../etc/x", "a b", "ключ", "字" * 341, "k" * 1024, "😀"]
)
def test_keys_of_any_printable_utf8_are_allowed(key):
    assert key_problem(key) is None
    check_key(key, "model")


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "not a non-empty string"),
        (None, "not a non-empty string"),
        (7, "not a non-empty string"),
        (b"a", "not a non-empty string"),
        ("__metadata__", "reserved"),
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("\x1b[31m", "control"),
        ("a\x7f", "control"),
        ("a\x80", "control"),
        ("a\x9bb", "control"),
        ("a\u2028b", "control"),
        ("a\u2029b", "control"),
        ("a\ud800", "UTF-8"),
        ("k" * 1025, "longer than 1024 bytes"),
        ("é" * 513, "longer than 1024 bytes"),
    ],
)
def test_other_keys_are_refused_with_the_reason(key, problem):
    assert problem in key_problem(key)


def test_a_refused_key_names_its_place_without_raw_control_characters():
    with pytest.raises(Unsupported, match=r"^optimizer: the key 'a\\x1bb' has control characters$"):
        check_key("a\x1bb", "optimizer")


@pytest.mark.parametrize(
    "group", ["model", "optimizer", "ema/model", "critic.optimizer", "a-b_c.d", "console", "g" * 100]
)
@pytest.mark.raises_nothing
def test_group_names_that_may_become_file_names(group):
    check_group(group)


@pytest.mark.parametrize(
    "group",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b/c",
        "/a",
        "a/",
        ".a",
        "a b",
        "a\\b",
        "a\0",
        "a\n",
        "é",
        "%2e",
        "con",
        "CON",
        "nul",
        "Aux",
        "prn",
        "com1",
        "LPT9",
        "ema/con",
        "g" * 101,
    ],
)
def test_group_names_that_are_refused(group):
    with pytest.raises(Unsupported, match="cannot name a group"):
        check_group(group)


def test_tensor_and_index_files_are_named_as_transformers_names_them():
    assert tensor_file("model", 1, 3) == "model-00001-of-00003.safetensors"
    assert tensor_file("ema/model", 123456, 123456) == "ema/model-123456-of-123456.safetensors"
    assert index_file("optimizer") == "optimizer.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("model-00001-of-00003.safetensors", True),
        ("ema/model-00001-of-00001.safetensors", True),
        ("model.safetensors", False),
        ("model-1-of-3.safetensors", False),
        ("-00001-of-00003.safetensors", False),
        ("model-00001-of-00003.safetensors.bak", False),
        ("model.safetensors.index.json", False),
    ],
)
def test_tensor_files_are_known_by_their_names(name, answer):
    assert is_tensor_file(name) is answer


@given(st.integers(0, 10**18))
def test_a_step_is_read_back_from_its_folder(step):
    assert folder_step(step_folder(step)) == step


def test_folders_of_steps_sort_as_the_steps_do():
    assert step_folder(1200) == "step-000000001200"
    assert step_folder(10**12) == "step-1000000000000"


@pytest.mark.parametrize(
    "folder",
    [
        "step-1200",
        "step-00000000120",
        "step-0000000001200",
        "step-000000001200.replaced",
        "step-000000001200\n",
        "step--00000001200",
        "step-00000000120a",
        ".step-000000001200",
        "step-",
        "step-000000001200/",
        "Step-000000001200",
        "latest",
        "",
    ],
)
def test_other_folders_are_no_step(folder):
    assert folder_step(folder) is None


@pytest.mark.parametrize("manifest", [b"", b"{", b"[]", b"7", b'{"attempt": 7}', b"{}", b"[" * 100_000])
def test_a_manifest_that_names_no_attempt_has_none(manifest: bytes) -> None:
    assert manifest_attempt(manifest) == ""


def test_the_attempt_of_a_manifest() -> None:
    assert manifest_attempt(b'{"attempt": ".attempt-1"}') == ".attempt-1"


@pytest.mark.parametrize(
    "name",
    [
        "holdfast.json",
        "state.json",
        "config.json",
        "generation_config.json",
        "critic/config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_names_that_holdfast_writes(name: str) -> None:
    assert is_holdfast_name(name) is True


@pytest.mark.parametrize("name", ["notes.txt", "config.json.bak", "model.safetensors", "index.json", ""])
def test_names_of_others(name: str) -> None:
    assert is_holdfast_name(name) is False


def test_folders_that_were_set_aside_say_why_and_which_step() -> None:
    assert damaged_folder(7) == "damaged-step-000000000007"
    assert abandoned_folder(7) == "abandoned-step-000000000007"
    for folder, kind in ((damaged_folder(7), "damaged"), (abandoned_folder(7), "abandoned")):
        assert set_aside_kind(folder) == kind
        assert set_aside_step(folder) == 7
    for folder in (step_folder(7), "lost-step-000000000007", "damaged-"):
        assert set_aside_kind(folder) is None
        assert set_aside_step(folder) is None


def test_names_of_iterations():
    names = ("iter_0000100", "iter_12345678", "iter_100", "step-100", "release")
    assert [iteration_step(name) for name in names] == [100, 12345678, None, None, None]
