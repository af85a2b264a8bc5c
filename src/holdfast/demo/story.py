"""The story of the demo: train, kill a rank during a save, resume on another layout, compare, generate, plot."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast
from holdfast.core.errors import InvalidArgument, TimedOut
from holdfast.core.names import step_folder
from holdfast.core.terminal import size_text, step_bar
from holdfast.storage import shared_storage_at
from holdfast.train.checkpoints import FOLDER
from holdfast.train.config import FILE
from holdfast.train.local_ranks import LocalRanks
from holdfast.train.metrics import METRICS, read_metrics
from holdfast.train.plot import Curve, draw_run, stalls
from holdfast.writer.in_flight import saves_in_flight

TEXT = """Kelp has no roots. What keeps it where it is, in surf that moves boulders, is a holdfast:
a knot of fingers that grows into every crack of the rock and does not let go.
Storms take the blades and the stalk, and the holdfast stays. From it the kelp grows again.
A training run is like that. Machines fail, meshes change, people stop and start.
What was learned must stay where it is, whole, and a new run must grow from it.
"""
STEPS, EVERY, KILLED_AT, VICTIM = 120, 20, 60, 2
FIRST = {"dp_shard": 4, "ep": 4}
SECOND = {"tp": 2, "pp": 2}
FIRST_NEAR = 1e-5  # relative: on another layout the first step adds the same numbers in another order
NEAR = 0.05  # later, tokens with nearly equal router probabilities may go to another expert
_DEADLINE_S = 900.0
_LOOK_S = 0.5  # how often the progress is read
_MARK = ".holdfast-demo"

_CONFIG = f"""
[model]
family = "qwen3_moe"
vocab_size = 256
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 64
initializer_range = 0.1
[data]
kind = "text"
sequence = 64
[optimizer]
lr = 4e-3
eps = 1e-6
[schedule]
warmup_steps = 10
[train]
steps = {STEPS}
global_batch = 8
micro_batch = 2
device = "cpu"
[checkpoint]
every_steps = {EVERY}
keep_last = 0
[ema]
decay = 0.95
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim of the demo, and whether it holds."""

    good: bool
    text: str


Say = Callable[[str], None]


class Story:
    """The demo, in order; `say` receives progress messages."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.folder = folder
        self._say = say
        _make_empty(folder)
        (folder / FILE).write_text(_CONFIG, encoding="utf-8")
        (folder / "text.txt").write_text(TEXT * 40, encoding="utf-8")

    def run(self) -> list[Finding]:
        """Run the demo and return its findings."""
        self._say(
            f"1. Train a small mixture of experts on 4 processes, sharded (FSDP2 x experts over ranks), {STEPS} steps, "
            f"a checkpoint every {EVERY}"
        )
        with self._shown("whole") as look:
            self._start("whole", FIRST, 4).finish(_DEADLINE_S, look)
        self._say(f"2. Train the same again, and kill a process while the checkpoint of step {KILLED_AT} is written")
        with self._shown("broken") as look:
            phase = self.kill_during_save(look)
        self._say(f"   rank {VICTIM} got SIGKILL, the others ended with it ({phase})")
        self._say("3. Go on from what is on disk, on another layout: tensor parallel 2 x pipeline 2")
        with self._shown("broken") as look:
            self._start("broken", SECOND, 4).finish(_DEADLINE_S, look)
        findings = [*self.curves_agree(), *self.bytes_are_good()]
        self._say("4. Open the last checkpoint with transformers as it is, and let the model write")
        findings += self.transformers_opens()
        self.draw()
        return findings

    def _start(self, name: str, layout: dict[str, int], ranks: int) -> LocalRanks:
        sets: dict[str, Any] = {f"layout.{axis}": size for axis, size in layout.items()}
        sets |= {"train.folder": str(self.folder / name), "data.path": str(self.folder / "text.txt")}
        options = [part for key, value in sets.items() for part in ("--set", f"{key}={value!r}")]
        logs = self.folder / "logs" / f"{name}-{'-'.join(layout) or 'one'}"
        return LocalRanks(ranks, ["train", str(self.folder / FILE), *options], logs)

    @contextmanager
    def _shown(self, name: str) -> Iterator[Callable[[], None]]:
        """Show how far a run has come; yields the function that looks."""
        metrics = self.folder / name / METRICS
        shown, next_look = 0, 0.0
        with step_bar("   training", STEPS) as advance:

            def look() -> None:
                nonlocal shown, next_look
                if time.monotonic() < next_look:
                    return
                next_look = time.monotonic() + _LOOK_S
                steps, _ = read_metrics(metrics) if metrics.exists() else ([], [])
                done = steps[-1]["step"] if steps else 0
                advance(done - shown)
                shown = done

            yield look

    def kill_during_save(self, look: Callable[[], None]) -> str:
        """Train until the save of a step is in flight, then kill a rank; returns the phase of the save."""
        ranks = self._start("broken", FIRST, 4)
        storage = shared_storage_at(str(self.folder / "broken" / FOLDER))
        end = time.monotonic() + _DEADLINE_S
        try:
            while ranks.alive() and time.monotonic() < end:
                flights = saves_in_flight(storage) if storage.exists() else []
                for flight in flights:
                    if flight.step == KILLED_AT:
                        ranks.kill(VICTIM)
                        return f"{flight.written} of {flight.total} bytes were written"
                look()
                time.sleep(0.002)
        finally:
            ranks.end(15.0)
        ranks.finish(1.0)
        raise TimedOut(f"no save of step {KILLED_AT} was seen in flight")

    def curves_agree(self) -> list[Finding]:
        """Check that the interrupted run has every step, with the losses of the uninterrupted run."""
        whole, broken = (self._losses(name) for name in ("whole", "broken"))
        _, events = read_metrics(self.folder / "broken" / METRICS)
        resumed = [event for event in events if event["event"] == "resumed"]
        derived = any(event["event"] == "random streams derived anew" for event in events)
        start = resumed[-1]["step"] if resumed else -1
        layout = resumed[-1]["layout"] if resumed else "nothing"
        gaps = {step: abs(broken[step] / whole[step] - 1) for step in whole if step in broken}
        first, worst = gaps.get(start + 1, 1.0), max(gaps.values(), default=1.0)
        same = all(broken.get(step) == whole[step] for step in whole if step <= start)
        return [
            Finding(start in (KILLED_AT, KILLED_AT - EVERY), f"the run resumed from step {start}, on {layout}"),
            Finding(broken.keys() == whole.keys(), f"no step is missing: {len(broken)} of {STEPS}"),
            Finding(same, f"up to step {start} the losses equal those of the uninterrupted run bit for bit"),
            Finding(first < FIRST_NEAR, f"first step on the new layout: relative difference {first:.1e}"),
            Finding(worst < NEAR, f"all steps: relative difference at most {worst:.1e}"),
            Finding(whole[STEPS] < whole[1] / 2, f"the model learned: loss {whole[1]:.2f} -> {whole[STEPS]:.2f}"),
            Finding(derived, "random streams were derived again for the new layout, as the metrics record"),
        ]

    def _losses(self, name: str) -> dict[int, float]:
        steps, _ = read_metrics(self.folder / name / METRICS)
        return {record["step"]: record["loss"] for record in steps}

    @property
    def checkpoint(self) -> Path:
        return self.folder / "broken" / FOLDER / step_folder(STEPS)

    def bytes_are_good(self) -> list[Finding]:
        report = holdfast.open(self.checkpoint).verify()
        return [Finding(report.good, f"every digest matches: {size_text(report.bytes)} in {report.files} files")]

    def transformers_opens(self) -> list[Finding]:
        """Open the model and its average with from_pretrained, and let the model continue the text."""
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError:
            return [Finding(False, "transformers is not installed: run pip install transformers and try again")]
        transformers.utils.logging.disable_progress_bar()
        words, odd = _generate(transformers, self.checkpoint, "")
        _, odd_average = _generate(transformers, self.checkpoint, "ema")
        self._say(f"   {TEXT[:24]!r} ... {words!r}")
        correct = sum(one == other for one, other in zip(words, TEXT[24:], strict=False))
        return [
            Finding(
                not odd and not odd_average, f"transformers opened {self.checkpoint} and its average, all keys match"
            ),
            Finding(
                correct > len(words) // 2, f"the model wrote {correct} of {len(words)} letters of the training text"
            ),
        ]

    def draw(self) -> None:
        """Plot both curves, the stall of each save, and the step of the kill."""
        _, events = read_metrics(self.folder / "broken" / METRICS)
        whole = Curve("4 ranks, uninterrupted", sorted(self._losses("whole").items()), 7.0)
        broken = Curve("killed and resumed", sorted(self._losses("broken").items()), 2.0)
        marks = [(KILLED_AT, f"rank {VICTIM} killed during a save")]
        marks += [(event["step"], "resumed on TP x PP") for event in events if event["event"] == "resumed"]
        draw_run(self.folder / "demo.png", [whole, broken], stalls(events), marks, "loss of a mixture of experts")


def _make_empty(folder: Path) -> None:
    """Create an empty folder with a marker file; raises InvalidArgument if it holds files of something else."""
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).exists():
        raise InvalidArgument(f"{folder} contains files that no demo wrote: choose another --out, or empty it yourself")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / _MARK).touch()


def _generate(transformers: Any, folder: Path, subfolder: str) -> tuple[str, list[str]]:
    """Return the text that the stored model generates after the prompt, and missing, unexpected or mismatched keys."""
    import torch

    opened = transformers.AutoModelForCausalLM.from_pretrained(folder, subfolder=subfolder, output_loading_info=True)
    model, info = opened
    tokens = torch.tensor([list(TEXT[:24].encode())])
    output = model.generate(tokens, max_new_tokens=56, do_sample=False, pad_token_id=0)
    odd = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    return bytes(output[0].tolist()).decode(errors="replace")[24:], [str(key) for key in odd]
