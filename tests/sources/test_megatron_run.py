from pathlib import Path

import pytest

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Damaged, NotFound, Unsupported
from holdfast.sources import open_source
from holdfast.sources.foreign import Foreign
from tests.convert.megatron import write_iteration, write_run
from tests.sources.test_parts import megatron, write


def test_the_iteration_that_the_tracker_names_is_opened_and_named(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", 200, 100)
    opened = open_source(root)
    assert isinstance(opened, Foreign) and opened.step == 100
    assert opened.notes[0] == f"{root} is a Megatron run; read from its newest iteration, {root}/iter_0000100"
    done = convert(root, tmp_path / "out", ConvertOptions())
    assert opened.notes[0] in done.notes and holdfast.open(tmp_path / "out").step == 100


def test_a_release_is_opened(tmp_path: Path) -> None:
    write_iteration(tmp_path / "run" / "release", None)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release")
    opened = open_source(tmp_path / "run")
    assert opened.path == f"{tmp_path}/run/release"


def test_a_folder_without_the_tracker_is_no_run(tmp_path: Path) -> None:
    write_iteration(tmp_path / "run" / "iter_0000001")
    with pytest.raises(Unsupported, match="it contains the torch DCP folders iter_0000001"):
        convert(tmp_path / "run", tmp_path / "out", ConvertOptions())


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [("300", NotFound, "names iter_0000300, which is missing"), ("../200", Damaged, "neither an iteration nor"),
     ("", Damaged, "neither an iteration nor")],
)  # fmt: skip
def test_a_tracker_that_leads_nowhere_is_an_error(tmp_path: Path, text: str, error: type, says: str) -> None:
    root = write_run(tmp_path / "run", 200)
    (root / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(error, match=says):
        open_source(root)


def test_the_parts_of_an_iteration_are_refused_with_their_folder(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / "run" / "iter_0000005" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", megatron(2))
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(Unsupported, match="iter_0000005: a Megatron checkpoint with the shards of ranks in mp_"):
        convert(tmp_path / "run", tmp_path / "out", ConvertOptions())


def test_open_takes_no_root_but_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="the root of a Megatron run; open one of its iterations"):
        holdfast.open(write_run(tmp_path / "run", 200))
