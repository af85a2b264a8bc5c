"""What a program costs: its size, its export, its load beside reading the weights, and its run beside `ep.module()`.

    python -m benchmarks.program                  # 1.04 billion parameters in fp32: 10 GB of memory, 5 GB of disk
    python -m benchmarks.program --tiny           # a decoder of two layers, to try it
    python -m benchmarks.program --only run       # only the small decoder beside ep.module()

Export: a decoder with real weights is exported in a process of its own, and the peak of its memory is reset before:
the growth must be far below the weights, and so must that of a decoder on the meta device. Load: the time of the
program alone (`device="meta"`, and the first call, which prepares the nodes), then the whole `load_program` beside
`holdfast.load` of the same weights into the model, in turns. Run: the eager model, `ep.module()` and the program on one
thread, in turns, in processor time, which other work on the machine does not add to.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks.decoder import SMALL, TINY, Decoder, DecoderShape, dynamic_sizes, make_decoder

WANTED = {"program.json, MB": 2.0, "export, share of the weights": 0.25, "load beside the weights, s": 2.0}
WANTED |= {"run / ep.module()": 1.10}
IDS = (2, 16)


def main() -> None:
    arguments = _arguments()
    rows: list[dict[str, Any]] = []
    if arguments.only in (None, "big"):
        context = multiprocessing.get_context("spawn")
        for step in (_export_and_save, _load):  # in processes of their own: the memory of one is not in the other's
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=step, args=(arguments, sender))
            process.start()
            sender.close()
            rows += receiver.recv()
            process.join()
        shutil.rmtree(arguments.folder)
    if arguments.only in (None, "run"):
        rows += _run(arguments.rounds)
    for row in rows:
        wanted = WANTED.get(row["name"])
        row["ok"] = wanted is None or row["value"] <= wanted
        target = "" if wanted is None else f"  wanted at most {wanted:g}: {'ok' if row['ok'] else 'MISSED'}"
        print(f"{row['what']:44} {row['name']:32} {row['value']:12.4g}{target}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"torch": str(torch.__version__), "rows": rows}, indent=1) + "\n")
    sys.exit(not all(row["ok"] for row in rows))


def _row(what: str, name: str, value: float) -> dict[str, Any]:
    return {"what": what, "name": name, "value": value}


def _shape(arguments: argparse.Namespace) -> DecoderShape:
    return TINY if arguments.tiny else DecoderShape()


def _filled(shape: DecoderShape) -> Decoder:
    """Return a decoder with memory of its own, which is in use: every byte was written."""
    model = make_decoder(shape, torch.float32, "meta").to_empty(device="cpu")
    model.rotary.reset_parameters()
    model.lm_head.weight = model.embed_tokens.weight  # to_empty made two of them
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(0.01 + number / 1e6)
    return model


def _export_and_save(arguments: argparse.Namespace, sender: Any) -> None:
    """Export from the meta device and with weights; save the latter with its program."""
    shape, rows = _shape(arguments), []
    holdfast.export_program(make_decoder(TINY, torch.float32, "cpu"), (_ids(TINY),), dynamic_sizes())  # imports
    program, model = None, None
    for device in ("meta", "cpu"):
        model = _filled(shape) if device == "cpu" else make_decoder(shape, torch.float32, device)
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        what = f"{weights / 4e9:.3f} billion parameters on {device}"
        before = _reset_peak()
        began = time.perf_counter()
        program = holdfast.export_program(model, (_ids(shape, device),), dynamic_sizes())
        rows.append(_row(what, "export, s", time.perf_counter() - began))
        grown = _memory("VmHWM") - before
        rows.append(_row(what, "export, MB of memory more", grown / 1e6))
        if not arguments.tiny:
            rows.append(_row(what, "export, share of the weights", grown / weights))
        rows.append(_row(what, "nodes", sum(1 for _ in program.walk())))
        rows.append(_row(what, "program.json, MB", len(program.to_json()) / 1e6))
    shutil.rmtree(arguments.folder, ignore_errors=True)
    holdfast.save(arguments.folder / "step", {"model": model}, program=program)
    sender.send(rows)


def _load(arguments: argparse.Namespace, sender: Any) -> None:
    """Load the program without weights, and the whole of it beside the weights alone."""
    shape, path = _shape(arguments), arguments.folder / "step"
    what = "load_program"
    holdfast.load(path, {"model": make_decoder(shape, torch.float32, "meta")})  # what a load imports, and page cache
    began = time.perf_counter()
    holdfast.load_program(path, device="meta")
    first = time.perf_counter() - began
    times: dict[str, list[float]] = {"program": [], "first call": [], "whole": [], "weights": []}
    ids = _ids(shape, "meta")
    for _ in range(arguments.rounds):
        began = time.perf_counter()
        module = holdfast.load_program(path, device="meta")
        times["program"].append(time.perf_counter() - began)
        began = time.perf_counter()
        module(ids)
        times["first call"].append(time.perf_counter() - began)
    for _ in range(arguments.load_rounds):
        began = time.perf_counter()
        module = holdfast.load_program(path)
        times["whole"].append(time.perf_counter() - began)
        del module
        model = make_decoder(shape, torch.float32, "meta")
        began = time.perf_counter()
        holdfast.load(path, {"model": model})
        times["weights"].append(time.perf_counter() - began)
        del model
    medians = {name: statistics.median(values) for name, values in times.items()}
    together = max(first, medians["program"]) + medians["first call"]
    rows = [
        _row(what, "the program alone, the first, s", first),
        _row(what, "the program alone, median, s", medians["program"]),
        _row(what, "its first call, on meta, s", medians["first call"]),
        _row(what, "load beside the weights, s", together),
        _row(what, "the whole with weights, s", medians["whole"]),
        _row("holdfast.load into the model", "weights, s", medians["weights"]),
    ]
    sender.send(rows)


def _run(rounds: int) -> list[dict[str, Any]]:
    """Run a small decoder on one thread, at two sizes, forward and with its backward."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_decoder(SMALL, torch.float32, "cpu")
    exported = torch.export.export(model, (_ids(SMALL),), dynamic_shapes=dynamic_sizes(), strict=False).module()
    program = holdfast.load_program(holdfast.export_program(model, (_ids(SMALL),), dynamic_sizes()), weights=model)
    modules: dict[str, Any] = {"eager": model, "ep.module()": exported, "program": program}
    rows = []
    for size, with_backward in (((1, 8), False), ((4, 64), False), ((4, 64), True)):
        ids = torch.randint(0, SMALL.vocab, size)
        calls = {name: _call(module, ids, with_backward) for name, module in modules.items()}
        assert all(torch.equal(model(ids), module(ids)) for module in modules.values())
        times = _interleaved(calls, max(rounds, 7))
        what = f"{'forward and backward' if with_backward else 'forward'}, {size[0]} x {size[1]} tokens"
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows += [_row(what, f"{name}, ms", median * 1e3) for name, median in medians.items()]
        rows.append(_row(what, "run / eager", medians["program"] / medians["eager"]))
        rows.append(_row(what, "run / ep.module()", medians["program"] / medians["ep.module()"]))
    checks = {"checks": lambda: program.flat_inputs((ids,), {})}
    rows.append(_row("checks of the inputs", "us", statistics.median(_interleaved(checks, 7)["checks"]) * 1e6))
    return rows


def _call(module: Any, ids: torch.Tensor, with_backward: bool) -> Callable[[], None]:
    def run() -> None:
        with torch.set_grad_enabled(with_backward):
            out = module(ids)
        if with_backward:
            out.square().mean().backward()
            for parameter in module.parameters():
                parameter.grad = None

    return run


def _interleaved(calls: dict[str, Callable[[], Any]], rounds: int, repeats: int = 5) -> dict[str, list[float]]:
    """Return processor seconds of one call, by name; the calls take turns, and the first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds + 2):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            began = time.process_time()
            for _ in range(repeats):
                calls[name]()
            if number >= 2:
                times[name].append((time.process_time() - began) / repeats)
    return times


def _ids(shape: DecoderShape, device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, shape.vocab, IDS, device=device)


def _reset_peak() -> int:
    """Reset the peak of this process's memory to what it uses now, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two layers in place of 1.04 billion parameters")
    parser.add_argument("--only", choices=("big", "run"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--load-rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("out/bench_program"))
    parser.add_argument("--json", type=Path, default=Path("out/bench_program.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
