"""Pack the exports of single operators: `python -m tests.sources.paddle.pir.make_archive FOLDER`."""

from __future__ import annotations

import shutil
import sys
import tarfile
from pathlib import Path

from tests.sources.paddle.pir.exports import GOLDEN, MODELS

_FILES = ("model.json", "model.pdiparams", "inputs.npz", "outputs.npz", "inputs_other.npz", "outputs_other.npz")


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member


def main(folder: Path) -> None:
    for name in MODELS:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        (GOLDEN / name).mkdir(parents=True)
        for file in _FILES:
            if (folder / name / file).exists():
                shutil.copyfile(folder / name / file, GOLDEN / name / file)
    with tarfile.open(GOLDEN / "operators.tar.xz", "w:xz", preset=9) as archive:
        for case in sorted(path for path in folder.iterdir() if path.name not in MODELS):
            for file in _FILES:
                if (case / file).exists():
                    archive.add(case / file, f"{case.name}/{file}", filter=_plain)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
