"""Without torch, whatever needs it says what to install; an interpreter without torch is asked."""

import os
import subprocess
from pathlib import Path

import pytest

import holdfast
from holdfast.core.errors import Unsupported
from holdfast.core.torch_needed import require_torch
from tests.doctor.containers import bare_python


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return bare_python(tmp_path_factory.mktemp("bare") / "env")


def run(bare, *arguments, cwd):
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = str(Path(holdfast.__file__).parents[1])
    command = [bare, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=environment)


CONFIG = Path(__file__).parents[2] / "examples" / "dense-tiny.toml"


@pytest.mark.parametrize(
    ("command", "caller", "package"),
    [
        (["train", "run.toml"], "holdfast train", "holdfast[torch]"),
        (["demo"], "holdfast demo", "holdfast[transformers]"),
        (["merge", "a", "b"], "this command", "holdfast[torch]"),
    ],
)
def test_a_command_says_what_to_install(bare, tmp_path, command, caller, package):
    (tmp_path / "run.toml").write_text(CONFIG.read_text())
    done = run(bare, "-m", "holdfast", *command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"holdfast: {caller} needs torch, which is not installed: pip install '{package}'")
    assert os.listdir(tmp_path) == ["run.toml"]


def test_python_calls_say_it_too(bare, tmp_path):
    program = (
        "import holdfast\n"
        "calls = [\n"
        "    lambda: holdfast.save('a', {'note': 1}),\n"
        "    lambda: holdfast.load('a', {'note': 1}),\n"
        "    lambda: holdfast.Checkpointer('a').save(1, {'note': 1}),\n"
        "    lambda: holdfast.Checkpointer('a').restore({'note': 1}),\n"
        "    lambda: holdfast.EMA,\n"
        "]\n"
        "for call in calls:\n"
        "    try:\n"
        "        call()\n"
        "    except holdfast.HoldfastError as error:\n"
        "        print(error)\n"
    )
    done = run(bare, "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    callers = ["holdfast.save", "holdfast.load", "a Checkpointer", "a Checkpointer", "holdfast.EMA"]
    assert [line.partition(" needs torch, which is not installed: pip install ")[0] for line in lines] == callers


def test_what_needs_no_torch_works_without(bare, tmp_path):
    assert run(bare, "-m", "holdfast", "ls", ".", cwd=tmp_path).returncode == 0


def test_with_torch_nothing_is_raised(monkeypatch):
    require_torch("a call")
    monkeypatch.setattr("holdfast.core.torch_needed.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="a call needs torch"):
        require_torch("a call")
