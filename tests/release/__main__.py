"""Release: `python -m tests.release [--tag] [--cuda] [--python 3.12 ...]`.

Builds the sdist and the wheel into dist/, runs twine check, compares their files with git's, and uses the wheel in a
bare environment of each Python that is found: without torch, then with it. `--tag` tags the commit afterwards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from holdfast.version import __version__
from tests.house.sources import REPOSITORY
from tests.release import archives, pythons, tag
from tests.release.bare import BareEnvironment

GOLDEN = REPOSITORY / "tests" / "golden" / "v1.2"


def main() -> int:
    """Build, check, try and tag; returns the exit code."""
    options = _parse()
    problems = tag.find_problems(REPOSITORY) if options.tag else []
    if not problems:
        sdist, wheel = archives.build(REPOSITORY, REPOSITORY / "dist")
        packed = archives.files_of_sdist(sdist), archives.files_of_wheel(wheel)
        problems = list(archives.find_problems(_tracked(), *packed))
    if problems:
        print("\n".join(problems))
        return 1
    for archive in (sdist, wheel):
        print(f"{archive.relative_to(REPOSITORY)}  {archive.stat().st_size:,} bytes")
    _try_everywhere(wheel, tuple(options.python), options.cuda)
    if options.tag:
        print(f"tagged {tag.make(REPOSITORY)}: push it when you want it to be seen")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build, check and try a release.")
    parser.add_argument("--tag", action="store_true", help="tag the commit once everything is good")
    parser.add_argument("--cuda", action="store_true", help="try with torch also where it brings CUDA packages")
    parser.add_argument("--python", action="append", choices=pythons.VERSIONS, default=[], help="only this version")
    options = parser.parse_args()
    options.python = options.python or pythons.VERSIONS
    return options


def _tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


def _try_everywhere(wheel: Path, versions: tuple[str, ...], cuda: bool) -> None:
    found = pythons.find(versions)
    if not found:
        raise SystemExit(f"no Python of {', '.join(versions)} was found on the PATH or in pyenv")
    torch, with_torch = _pinned_torch(), 0
    for version in versions:
        if version not in found:
            print(f"Python {version}: not found on this machine, not tried")
            continue
        bare = BareEnvironment(found[version], REPOSITORY / "out" / "release" / version)
        bare.install(wheel)
        bare.try_wheel(GOLDEN, torch=False)
        print(f"Python {version} without torch: ok", flush=True)
        packages = [] if cuda else bare.cuda_packages(torch)
        if packages:
            print(f"Python {version} with {torch}: not tried: pip would bring {len(packages)} CUDA packages")
            print("    (make release CUDA=1 takes them, TORCH_INDEX=ADDRESS the build for the CPU)", flush=True)
            continue
        bare.install(wheel, torch)
        bare.try_wheel(GOLDEN, torch=True)
        print(f"Python {version} with {torch}: ok", flush=True)
        with_torch += 1
    if not with_torch:
        raise SystemExit("the wheel was tried with torch nowhere: that does not do for a release")
    print(f"Holdfast {__version__} can be released")


def _pinned_torch() -> str:
    """Return the requirement of torch that the tests run with."""
    lines = (REPOSITORY / "requirements" / "torch.txt").read_text(encoding="utf-8").splitlines()
    return next(line.split()[0] for line in lines if line.startswith("torch=="))


if __name__ == "__main__":
    sys.exit(main())
