"""`Diagnosis`: the verdict of one check, the reason, and the commands that change it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """OK: nothing to do. NOTE: worth knowing, and a run works. CHANGE: change it before a run."""

    OK = "ok"
    NOTE = "note"
    CHANGE = "change"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check. `remedy` says what to change, `commands` how; both are empty if nothing is to do."""

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""
    commands: tuple[str, ...] = ()

    @staticmethod
    def ok(check: str, text: str) -> Diagnosis:
        return Diagnosis(check, Verdict.OK, text)

    @staticmethod
    def note(check: str, text: str, remedy: str = "", *commands: str) -> Diagnosis:
        return Diagnosis(check, Verdict.NOTE, text, remedy, commands)

    @staticmethod
    def change(check: str, text: str, remedy: str, *commands: str) -> Diagnosis:
        return Diagnosis(check, Verdict.CHANGE, text, remedy, commands)
