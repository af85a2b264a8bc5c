"""An error about a setting names the file and the line of the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.train.config_place import named_place
from holdfast.train.open_run import open_run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dims = [16, 32, 64]", "dims = [16, 65]", "embedding dims=65 is more than the 64 numbers"),
        ('pooling = "mean"', 'pooling = "max"', "embedding pooling='max'"),
        ("lr = 3e-3", "lrr = 3e-3", "did you mean lr"),
        ("temperature = 0.05", "temperature = -1.0", "temperature=-1.0 must be a number above 0"),
        ("global_batch = 32", "global_batch = 0", "train.global_batch=0"),
        ("files = [", "file = [", "did you mean files"),
        ('kind = "similarity"', 'kinds = "similarity"', "there is no setting evaluation.sets[1].kinds"),
    ],
)
def test_the_line_is_that_of_the_setting(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (EXAMPLES / "embedding-tiny.toml").read_text()
    line = 1 + next(number for number, found in enumerate(text.splitlines()) if found.startswith(old))
    path = tmp_path / "run.toml"
    path.write_text(text.replace(old, new))
    place = f"{path}: " if "temperature" in old else f"{path}:{line}: "  # the loss does not know its section
    with pytest.raises(InvalidArgument) as caught:
        open_run(path)
    assert str(caught.value).startswith(place) and message in str(caught.value)


def test_other_errors_and_settings_of_no_line_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[a]\nb = 1\n")
    for message, place in (("a.e = 1", ""), ("a.b: 1", ":2"), ("something else", ""), ("the settings a.b=1", ":2")):
        with pytest.raises(InvalidArgument) as caught, named_place(path):
            raise InvalidArgument(message)
        assert str(caught.value) == f"{path}{place}: {message}"
    with pytest.raises(NotFound, match=r"^gone$"), named_place(path):
        raise NotFound("gone")
