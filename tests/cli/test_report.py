"""`holdfast report`: one file, written whole or not at all."""

from tests.cli.calls import call, process
from tests.web import sample_runs


def test_the_file_is_written_whole(tmp_path):
    sample_runs.branches(tmp_path / "run")
    output = tmp_path / "llama.html"
    output.write_text("before")
    done = call("report", tmp_path / "run", "-o", output)
    assert (done.exit_code, str(output) in done.output) == (0, True)
    page = output.read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.html", "run"]


def test_errors_leave_the_file_as_it_was(tmp_path):
    output = tmp_path / "report.html"
    output.write_text("before")
    missing = process("report", tmp_path / "nothing", "-o", output)
    assert (missing.returncode, output.read_text()) == (2, "before")
    sample_runs.light_steps(tmp_path / "run", [1])
    nowhere = process("report", tmp_path / "run", "-o", tmp_path / "no" / "report.html")
    assert nowhere.returncode == 2
    assert "choose another file with -o" in nowhere.stderr
