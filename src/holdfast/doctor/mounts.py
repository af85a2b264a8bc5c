"""The mount of a path: kind of file system, source and options, from /proc/self/mountinfo."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: where it is mounted, the kind of file system, and all options."""

    point: str
    kind: str
    source: str
    options: frozenset[str]

    @staticmethod
    def parse(line: str) -> Mount:
        """Parse a line: "36 35 98:0 /root /point rw shared:1 - ext4 /dev/sda rw"."""
        before, _, after = line.partition(" - ")
        fields, (kind, source, *options) = before.split(), after.split()
        every = ",".join([fields[5], *options])
        return Mount(_unescape(fields[4]), kind, _unescape(source), frozenset(every.split(",")))

    @staticmethod
    def of(path: Path, mounts: str | None = None) -> Mount | None:
        """Return the mount that holds an existing path; None where the system does not list mounts."""
        try:
            text = os.fsdecode(_MOUNTS.read_bytes()) if mounts is None else mounts
        except OSError:
            return None
        real = os.path.realpath(path)
        found = None
        for mount in map(Mount.parse, text.splitlines()):
            inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
            if inside and (found is None or len(mount.point) >= len(found.point)):  # a later mount hides an earlier one
                found = mount
        return found


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
