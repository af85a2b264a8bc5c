"""An attack on a reader: how it is planted in a folder, and what came of reading it.

The attacks are plain data, so that the tests and the fault table use the same ones.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import holdfast
from tests.attacks.forge import OUTSIDE, examine, tensor, tensor_file
from tests.effort import excess

DEADLINE_S = 120.0  # of the clock: only what waits for ever takes that long, however busy the machine is
WORKING_S = 30.0  # of the processor: only what works for ever takes that long
PROCESSOR_S = 3.0
MESSAGE_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack. `on` is a real "checkpoint", or a "foreign" folder that is still empty.

    Most are to be refused. A `harmless` one is only to be read as what it says: a key that looks
    like a path is a good key, and never becomes a path.
    """

    name: str
    plant: Callable[[Path], None]
    on: str = "checkpoint"
    harmless: bool = False


class Hung(BaseException):
    """Reading took longer than the deadline; no handler of errors may swallow it."""


def save_original(path: Path) -> Path:
    """A small real checkpoint, to be copied and attacked."""
    import torch

    holdfast.save(path, {"model": torch.nn.Linear(4, 3), "note": {"epoch": 1}})
    return path


def lay_out(attack: Attack, original: Path, place: Path) -> Path:
    """Plant the attack in a folder of its own under `place`, beside a file that it must not reach."""
    folder = place / "target"
    if attack.on == "checkpoint":
        shutil.copytree(original, folder)
    else:
        folder.mkdir()
    (place / OUTSIDE).write_bytes(tensor_file({"key": tensor(0, 6)}, b"secret"))
    attack.plant(folder)
    return folder


def problem_of(attack: Attack, folder: Path) -> str:
    """What is wrong with how the folder is read; "" when the attack came to nothing."""
    outside = sorted(folder.parent.iterdir())
    started = time.process_time()
    try:
        with _deadline():
            examine(folder)
        answer = "" if attack.harmless else "it was read as if it were good"
    except holdfast.HoldfastError as error:
        answer = _bad_message(str(error)) if not attack.harmless else f"it was refused: {error}"
    except (Exception, Hung) as error:  # noqa: BLE001  (any other error is what the attack wants)
        answer = f"{type(error).__name__}: {error}"[:300]
    answer = answer or excess(time.process_time() - started, PROCESSOR_S)
    if sorted(folder.parent.iterdir()) != outside:
        answer = answer or "something was written outside of the folder"
    return answer


def _bad_message(text: str) -> str:
    if not text.isprintable():
        return f"the message speaks to the terminal: {text[:100]!r}"
    return "" if len(text) < MESSAGE_CHARS else f"the message has {len(text)} characters"


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        of = "the clock" if number == signal.SIGALRM else "the processor"
        raise Hung(f"not done after {DEADLINE_S if number == signal.SIGALRM else WORKING_S:.0f} s of {of}")

    before = {number: signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    signal.setitimer(signal.ITIMER_PROF, WORKING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def problems(attacks: Sequence[Attack]) -> Iterator[str]:
    """The problem of each attack in turn, "" for most; told on standard error with the attack's name."""
    with tempfile.TemporaryDirectory(prefix="holdfast-attacks-") as top:
        original = save_original(Path(top) / "original")
        for number, attack in enumerate(attacks):
            place = Path(top) / str(number)
            place.mkdir()
            problem = problem_of(attack, lay_out(attack, original, place))
            if problem:
                print(f"attack {attack.name!r}: {problem}", file=sys.stderr)
            shutil.rmtree(place)
            yield problem
