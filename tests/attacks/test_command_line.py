"""The command line before hostile checkpoints: one line and an exit code, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.cli import main as command_line
from tests.attacks import bombs, files, headers, names, pickles, versions
from tests.attacks.attack import Attack, lay_out
from tests.cli.calls import process

SAMPLE = tuple(
    attack
    for corpus, every in (
        (headers.ATTACKS, 6),
        (names.IN_KEYS[: len(names.BAD_KEYS)], 5),
        (names.IN_FILES, 6),
        (names.IN_WEIGHT_MAP, 12),
        (files.ATTACKS, 5),
        (bombs.ATTACKS, 4),
        (pickles.ATTACKS, 4),
        (versions.ATTACKS, 4),
    )
    for attack in corpus[::every]
    if not attack.harmless
)


def exit_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """The exit code and all output of the command line, run in this process by its real entry."""
    monkeypatch.setattr("sys.argv", ["holdfast", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        command_line.main()
    out = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, out.out + out.err


@pytest.mark.parametrize("attack", SAMPLE, ids=lambda attack: attack.name)
def test_verify_says_no_in_plain_lines(
    original: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    attack: Attack,
) -> None:
    folder = lay_out(attack, original, tmp_path)
    code, text = exit_of(monkeypatch, capsys, "verify", folder)
    assert code in (1, 2), text
    assert text.strip() and "Traceback" not in text
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "attack", [headers.ATTACKS[0], names.IN_FILES[4], files.ATTACKS[0], pickles.ATTACKS[0]], ids=lambda a: a.name
)
def test_as_a_user_calls_it_there_is_one_line(original: Path, tmp_path: Path, attack: Attack) -> None:
    done = process("show", lay_out(attack, original, tmp_path))
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("holdfast: ") and len(done.stderr.splitlines()) == 1


def test_the_runner_sees_what_a_user_sees() -> None:
    assert CliRunner().invoke(command_line.cli, ["--version"]).exit_code == 0
