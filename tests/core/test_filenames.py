import pytest

from holdfast.core.errors import Damaged
from holdfast.core.filenames import case_collision, check_case_collisions, check_file, is_plain

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
