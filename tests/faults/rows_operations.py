"""Adapters merged and extracted, and weights quantized and dequantized: killed, on a full disk, with unfit inputs."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import holdfast
from holdfast.convert.quantize import QuantizeOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.merging.lora.extract_adapter import ExtractOptions, extract_adapter
from tests.faults.cases import Wrong, run_cases
from tests.faults.operations import Operation, Outcome, Place, every_call, failing, files_of, fresh_folder, killed
from tests.faults.row import Row, Tally

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
EMBEDDING = "model.embed_tokens"
ADAPTER = "base_model.model."
SMALL: dict[str, Any] = {"to": "hf", "block_bytes": 8192, "max_shard_size": 60_000, "force": True}
Tensors = dict[str, torch.Tensor | None]


def write(folder: Path, tensors: Tensors, name: str = "model.safetensors", **config: object) -> Path:
    """Write a folder of tensors with a config; tensors that are None are left out."""
    folder.mkdir(exist_ok=True)
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / name)
    file = "config.json" if name == "model.safetensors" else "adapter_config.json"
    (folder / file).write_text(json.dumps({"model_type": "llama", **config} if file == "config.json" else config))
    return folder


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a small model."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {UP: (130, 140), DOWN: (140, 130), EMBEDDING: (20, 140)}
    return {f"{key}.weight": torch.randn(*shape, generator=generator).bfloat16() for key, shape in shapes.items()}


def adapter() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    shapes = {
        f"{UP}.lora_A.weight": (4, 140),
        f"{UP}.lora_B.weight": (130, 4),
        f"{EMBEDDING}.lora_embedding_A": (4, 20),
        f"{EMBEDDING}.lora_embedding_B": (140, 4),
    }
    return {f"{ADAPTER}{key}": torch.randn(*shape, generator=generator) for key, shape in shapes.items()}


CONFIG: dict[str, object] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def write_adapter(folder: Path, tensors: Tensors | None = None, **config: object) -> None:
    write(folder, {**adapter(), **(tensors or {})}, "adapter_model.safetensors", **{**CONFIG, **config})


def _base_and_adapter(folder: Path) -> None:
    write(folder / "base", {**model()})
    write_adapter(folder / "adapter")


def _merge_lora(folder: Path, target: Path) -> None:
    holdfast.merge_lora(folder / "adapter", target, base=folder / "base", max_shard_size=30_000, force=True)


def _base_and_tuned(folder: Path) -> None:
    write(folder / "base", {**model()})
    write(folder / "tuned", {**model(1)})


def _extract(folder: Path, target: Path) -> None:
    extract_adapter(ExtractOptions(str(folder / "base"), str(folder / "tuned"), 4, force=True), target)


def _plain(folder: Path) -> None:
    write(folder / "source", {**model()})


def _quantize(folder: Path, target: Path) -> None:
    convert(folder / "source", target, ConvertOptions(quantize=QuantizeOptions(), **SMALL))


def quantized_model() -> dict[str, torch.Tensor]:
    out = model()
    for key in (UP, DOWN):
        out[f"{key}.weight"] = out[f"{key}.weight"].to(torch.float8_e4m3fn)
        out[f"{key}.weight_scale_inv"] = torch.full((2, 2), 0.3)
    return out


def write_quantized(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Write a quantized model; `up` and `scale` replace a weight and its scales."""
    names = {"up": f"{UP}.weight", "scale": f"{UP}.weight_scale_inv"}
    write(folder, {**quantized_model(), **{names[name]: value for name, value in tensors.items()}})


def _dequantize(folder: Path, target: Path) -> None:
    convert(folder / "source", target, ConvertOptions(dequantize="bfloat16", **SMALL))


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("merge --lora", _base_and_adapter, _merge_lora),
        Operation("extract-lora", _base_and_tuned, _extract),
        Operation("convert --quantize", _plain, _quantize),
        Operation("convert --dequantize", lambda folder: write_quantized(folder / "source"), _dequantize),
    )
}


def _truncated(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def _pickled(folder: Path, name: str) -> None:
    """Put a pickle that would write a file in place of an adapter's tensors."""
    (folder / "adapter_model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Hostile()))


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("a pickle was loaded",)


def _huge_header(file: Path) -> None:
    """A header that states a rank far beyond the bytes of the file."""
    header = {
        f"{ADAPTER}{UP}.lora_A.weight": {"dtype": "F32", "shape": [10**12, 140], "data_offsets": [0, 560 * 10**12]}
    }
    data = json.dumps(header).encode()
    file.write_bytes(len(data).to_bytes(8, "little") + data)


def _damaged_step(path: Path) -> None:
    """Put a Holdfast step of the same model with a flipped bit in place of a model."""
    convert(path, path.with_name("step"), ConvertOptions(block_bytes=4096))
    shutil.rmtree(path)
    path.with_name("step").rename(path)
    file = next(path.glob("model*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)


def _model_with(name: str, **tensors: torch.Tensor | None) -> Callable[[Path], object]:
    changed = {f"{key.replace('__', '.')}": value for key, value in tensors.items()}
    return lambda folder: write(folder / name, {**model(), **changed})


A, B = f"{ADAPTER}{UP}.lora_A.weight", f"{ADAPTER}{UP}.lora_B.weight"
HUGE = {A: torch.ones(20_000, 140, dtype=torch.float16), B: torch.ones(130, 20_000, dtype=torch.float16)}
OTHER_SHAPE = torch.randn(131, 140).bfloat16()

# Inputs that do not fit, by operation: how to spoil the inputs, and a part of the error.
Spoil = Callable[[Path], object]
UNFIT: dict[str, dict[str, tuple[Spoil, str]]] = {
    "merge --lora": {
        "a pickle": (lambda f: _pickled(f / "adapter", "adapter_model.bin"), "is a pickle"),
        "a pickle under another name": (lambda f: _pickled(f / "adapter", "adapter_model.safetensors"), "header"),
        "a huge rank in the config": (lambda f: write_adapter(f / "adapter", r=10**9), "expected a rank from 1 to"),
        "a huge rank of tensors": (lambda f: write_adapter(f / "adapter", {**HUGE}), "the rank in the config is 4"),
        "a huge rank of a module": (
            lambda f: write_adapter(f / "adapter", {**HUGE}, rank_pattern={"up_proj": 20_000}),
            "expected a rank from 1 to",
        ),
        "a header of a huge rank": (
            lambda f: _huge_header(f / "adapter" / "adapter_model.safetensors"),
            "tensors end at",
        ),
        "a nested config": (
            lambda f: (f / "adapter" / "adapter_config.json").write_text("[" * 100_000),
            "adapter_config.json",
        ),
        "a pattern that matches forever": (
            lambda f: write_adapter(f / "adapter", rank_pattern={"(a+)+x": 3}),
            "may take forever",
        ),
        "another shape": (lambda f: write_adapter(f / "adapter", {A: torch.ones(4, 141)}), "[4, 141]"),
        "a missing tensor": (lambda f: write_adapter(f / "adapter", {B: None}), "but no lora_B.weight"),
        "a base without the weight": (_model_with("base", **{f"{UP}.weight": None}), "has no weight of"),
        "a base of another shape": (_model_with("base", **{f"{UP}.weight": OTHER_SHAPE}), "[131, 140]"),
        "half an adapter": (lambda f: _truncated(f / "adapter" / "adapter_model.safetensors", 3000), "adapter_model"),
        "half a base": (lambda f: _truncated(f / "base" / "model.safetensors", 3000), "model.safetensors"),
        "a damaged base": (lambda f: _damaged_step(f / "base"), "the digest"),
    },
    "extract-lora": {
        "another shape": (_model_with("tuned", **{f"{UP}.weight": OTHER_SHAPE}), "bfloat16[131, 140]"),
        "a missing tensor": (_model_with("tuned", **{f"{UP}.weight": None}), "has no"),
        "one tensor more": (_model_with("tuned", extra=torch.ones(2)), "has 'extra', which no module of"),
        "values that are not finite": (
            _model_with("tuned", **{f"{UP}.weight": torch.full((130, 140), float("nan")).bfloat16()}),
            "finite",
        ),
        "half a file": (lambda f: _truncated(f / "tuned" / "model.safetensors", 3000), "model.safetensors"),
        "a damaged model": (lambda f: _damaged_step(f / "tuned"), "the digest"),
        "the same model": (lambda f: write(f / "tuned", {**model()}), "nothing to extract"),
    },
    "convert --quantize": {
        "values that are not finite": (
            _model_with("source", **{f"{UP}.weight": torch.full((130, 140), float("inf")).bfloat16()}),
            "finite",
        ),
        "a quantized model": (lambda f: write_quantized(f / "source"), "quantized"),
        "half a file": (lambda f: _truncated(f / "source" / "model.safetensors", 3000), "model.safetensors"),
        "a damaged model": (lambda f: _damaged_step(f / "source"), "the digest"),
    },
    "convert --dequantize": {
        "a missing scale": (lambda f: write_quantized(f / "source", scale=None), "scale"),
        "a scale without its weight": (lambda f: write_quantized(f / "source", up=None), "weight"),
        "scales of another shape": (lambda f: write_quantized(f / "source", scale=torch.ones(3, 2)), "[3, 2]"),
        "scales that are not finite": (
            lambda f: write_quantized(f / "source", scale=torch.full((2, 2), float("nan"))),
            "finite",
        ),
        "half a file": (lambda f: _truncated(f / "source" / "model.safetensors", 3000), "model.safetensors"),
        "a damaged model": (lambda f: _damaged_step(f / "source"), "the digest"),
    },
}


def refused(name: str, unfit: str, *, occupied: bool) -> None:
    """Spoil the inputs of an operation: one clear error, and the target is as it was."""
    spoil, text = UNFIT[name][unfit]
    with fresh_folder() as folder:
        place = Place(folder / "place", OPERATIONS[name], occupied=occupied)
        spoil(place.folder)
        spoilt = place.found_inputs()
        try:
            place.work()
        except holdfast.HoldfastError as error:
            if text not in str(error) or len(str(error)) > 1000:
                raise Wrong(f"the error is not clear: {error!r}") from error
        else:
            raise Wrong("the operation succeeded")
        if files_of(place.target) != place.before or place.leftovers() or place.found_inputs() != spoilt:
            raise Wrong(f"the target has {sorted(files_of(place.target))}, left are {place.leftovers()}")


def _every_call(name: str, fault: str, case: Callable[[Place, int], Outcome], seed: int) -> Tally:
    """Inject a fault at every call, with another model at the target; for one operation also without."""
    total = Tally()
    for occupied in (True, False) if name == "merge --lora" else (True,):  # all publish alike
        total += every_call(OPERATIONS[name], occupied, case, f"{name}: {fault}, seed {seed}")
    return total


def _refusals(name: str, seed: int) -> Tally:
    cases = [
        (f"{unfit}, {occupied=}", partial(refused, name, unfit, occupied=occupied))
        for unfit in UNFIT[name]
        for occupied in (False, True)
    ]
    return run_cases(f"{name}: inputs that do not fit", seed, cases)


def _rows(name: str) -> tuple[Row, ...]:
    return (
        Row(f"{name}: SIGKILL at file system call k, every k", partial(_every_call, name, "SIGKILL", killed)),
        Row(
            f"{name}: ENOSPC at file system call k, from then on",
            partial(_every_call, name, "ENOSPC", partial(failing, errno.ENOSPC)),
        ),
        Row(f"{name}: inputs that do not fit, are damaged or hostile", partial(_refusals, name)),
    )


ROWS = tuple(row for name in OPERATIONS for row in _rows(name))
