"""Peak memory of merges, of adapters, fp8 and resized vocabularies with a table of 4 GB, beside one of 64 MB.

    python -m benchmarks.big_table [--gb 4] [--operations merge ties lora extract resize quantize dequantize]

Each operation runs in a process of its own, first on a model with the small table, then on one with the big one. Peak
memory is that of the process above its memory after the imports, as the kernel counts it, mapped files included. The
tables are sparse files with a page of random numbers in every 64 MB; the outputs are written whole, so that the disk
needs 3 times the table. Exits 1 if a peak with the big table is more than 64 MB above that with the small one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

MB = 1000**2
MOST_MORE_MB = 64
COLUMNS = 2048
KEY = "model.embed_tokens"
LINEAR = "model.layers.0.mlp.up_proj"
RANK = 8
_PAGE, _EVERY = 1 << 20, 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--operations", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS))
    parser.add_argument("--folder", type=Path, default=Path("out/bench-big-table"))
    parser.add_argument("--operation", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.operation:
        measure(*arguments.operation)
        return
    sizes = {"small": 64 * MB, "big": int(arguments.gb * 1000 * MB)}
    good = True
    try:
        for size, table_bytes in sizes.items():
            make(arguments.folder / size, table_bytes // (2 * COLUMNS) // 128 * 128)
        print(f"{'operation':12} {'small MB':>9} {'big MB':>9} {'big s':>9}", flush=True)
        for name in arguments.operations:
            found = {size: run(name, arguments.folder / size) for size in sizes}
            (small, _), (big, seconds) = found["small"], found["big"]
            print(f"{name:12} {small / MB:9.0f} {big / MB:9.0f} {seconds:9.1f}", flush=True)
            good = good and big - small < MOST_MORE_MB * MB
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    sys.exit(0 if good else 1)


def make(folder: Path, rows: int) -> None:
    """Write two models with a table of so many rows, and an adapter that changes the table and a linear layer."""
    shutil.rmtree(folder, ignore_errors=True)
    shapes = {f"{KEY}.weight": [rows, COLUMNS], f"{LINEAR}.weight": [1024, COLUMNS]}
    for name in ("a", "b"):
        write_sparse(folder / name / "model.safetensors", {key: ("BF16", shape) for key, shape in shapes.items()})
        (folder / name / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows}))
    adapter = {f"{KEY}.lora_embedding_A": [RANK, rows], f"{KEY}.lora_embedding_B": [COLUMNS, RANK]}
    adapter |= {f"{LINEAR}.lora_A.weight": [RANK, COLUMNS], f"{LINEAR}.lora_B.weight": [1024, RANK]}
    tensors = {f"base_model.model.{key}": ("F32", shape) for key, shape in adapter.items()}
    write_sparse(folder / "adapter" / "adapter_model.safetensors", tensors)
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(fields))
    fp8 = {f"{LINEAR}.weight": ("F8_E4M3", [rows, COLUMNS])}
    fp8[f"{LINEAR}.weight_scale_inv"] = ("F32", [rows // 128, COLUMNS // 128])
    write_sparse(folder / "fp8" / "model.safetensors", fp8)
    (folder / "fp8" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    linear = {f"{LINEAR}.weight": ("BF16", [rows, COLUMNS])}
    write_sparse(folder / "linear" / "model.safetensors", linear)
    (folder / "linear" / "config.json").write_text(json.dumps({"model_type": "llama"}))


def write_sparse(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """Write a safetensors file of zeros with small random numbers in some pages."""
    widths = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    header, end = {}, 0
    for key, (dtype, shape) in tensors.items():
        size = shape[0] * shape[1] * widths[dtype]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        begin = file.tell()
        file.truncate(begin + end)
        for offset in range(0, end, _EVERY):
            file.seek(begin + offset)
            # Bytes below 0x40 are small finite numbers in all these dtypes.
            file.write(bytes(byte & 0x3F for byte in os.urandom(min(_PAGE, end - offset))))


def run(name: str, folder: Path) -> tuple[int, float]:
    """Run an operation in a process of its own; return its peak memory and its seconds."""
    command = [sys.executable, "-m", "benchmarks.big_table", "--operation", name, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(folder / "made")
    peak, seconds = done.stdout.split()[-2:]
    return int(peak), float(seconds)


def measure(name: str, folder: str) -> None:
    """Do an operation, and print the peak memory above that after the imports, and the seconds."""
    for module in ("merging.merge", "merging.lora.extract_adapter", "tokens.resize_vocabulary", "convert.quantize"):
        importlib.import_module(f"holdfast.{module}")
    importlib.import_module("torch")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
    before, start = status("VmRSS"), time.monotonic()
    OPERATIONS[name](Path(folder))
    print(status("VmHWM") - before, time.monotonic() - start)


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def merge(folder: Path) -> None:
    import holdfast

    holdfast.merge([folder / "a", folder / "b"], folder / "made", weights=[0.7, 0.3])


def merge_ties(folder: Path) -> None:
    import holdfast

    holdfast.merge([folder / "b"], folder / "made", method="ties", base=folder / "a", weights=[1], densities=[0.5])


def lora(folder: Path) -> None:
    import holdfast

    holdfast.merge_lora(folder / "adapter", folder / "made", base=folder / "a")


def extract(folder: Path) -> None:
    from holdfast.merging.lora.extract_adapter import ExtractOptions, extract_adapter

    extract_adapter(ExtractOptions(str(folder / "a"), str(folder / "b"), RANK), folder / "made")


def resize(folder: Path) -> None:
    from holdfast.tokens.resize_vocabulary import ResizeOptions, resize_vocab

    rows = json.loads((folder / "a" / "config.json").read_text())["vocab_size"]
    resize_vocab(folder / "a", folder / "made", ResizeOptions(size=rows + 1000))


def quantize(folder: Path) -> None:
    from holdfast.convert.quantize import QuantizeOptions
    from holdfast.convert.run import ConvertOptions, convert

    convert(folder / "linear", folder / "made", ConvertOptions(to="hf", quantize=QuantizeOptions()))


def dequantize(folder: Path) -> None:
    from holdfast.convert.run import ConvertOptions, convert

    convert(folder / "fp8", folder / "made", ConvertOptions(to="hf", dequantize="bfloat16"))


OPERATIONS = {
    "merge": merge,
    "ties": merge_ties,
    "lora": lora,
    "extract": extract,
    "resize": resize,
    "quantize": quantize,
    "dequantize": dequantize,
}

if __name__ == "__main__":
    main()
