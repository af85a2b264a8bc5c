"""Unpack the AOA engine of a Paddle wheel of another platform into this environment: `unpack_engine.py WHEELS`.

The engine is plain Python; of the rest of the wheel, which this platform could not run, nothing is unpacked.
"""

from __future__ import annotations

import sys
import sysconfig
import zipfile
from pathlib import Path


def main(wheels: Path) -> None:
    (wheel,) = wheels.glob("paddlepaddle-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("paddle/distributed/flex_checkpoint/")]
        archive.extractall(sysconfig.get_paths()["purelib"], names)
    print(f"{wheel.name}: no wheel for this platform; {len(names)} files of its AOA engine unpacked")
    wheel.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
