"""Run AOA programs through Paddle's own engine, without the compiled part of Paddle.

    python aoa_engine.py FOLDER cases.json results.json

FOLDER holds Paddle's Python package (`paddle/`), installed or unpacked from a wheel of any platform: the engine
is plain Python over shapes, and its parent packages are replaced by empty ones. Every case names its statements, its
sources and, where they are known, its targets; the result has the digest of every target's bytes, or the engine's
error. Numpy carries out what the engine plans, as Paddle's `assign_sharded_slice` does.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Case = dict[str, Any]
_PACKAGES = ("paddle", "paddle.distributed", "paddle.distributed.flex_checkpoint")


def open_engine(folder: Path) -> tuple[Any, Any]:
    """Return the engine's class and that of a shard, of the Paddle in `folder`."""
    for name in _PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    logging.disable(logging.CRITICAL)
    from paddle.distributed.flex_checkpoint.aoa.aoa_engine import AOAEngine
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeightDesc

    return AOAEngine, ShardedWeightDesc


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def source_array(key: str, shape: list[int], dtype: str) -> np.ndarray[Any, Any]:
    """Random numbers that depend on nothing but the key, its shape and its dtype."""
    generator = np.random.default_rng(zlib.crc32(f"{key} {shape}".encode()))
    return generator.standard_normal(shape).astype(np.float32).astype(dtype_of(dtype))


def digest(array: np.ndarray[Any, Any]) -> str:
    """Return dtype, shape and a digest of the bytes."""
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
    return f"{array.dtype.name} {list(array.shape)} {content}"


def shards(desc: Any, key: str, shape: list[int], dtype: str, axis: int, count: int) -> list[Any]:
    """Describe a tensor that is sharded evenly into `count` along `axis`; whole where that does not divide."""
    axis = min(axis, len(shape) - 1)
    if count == 1 or not shape or shape[axis] % count:
        return [desc(key, tuple(shape), tuple(shape), (0,) * len(shape), dtype)]
    local = tuple(size // count if dim == axis else size for dim, size in enumerate(shape))
    offsets = (tuple(rank * local[axis] if dim == axis else 0 for dim in range(len(shape))) for rank in range(count))
    return [desc(key, local, tuple(shape), offset, dtype) for offset in offsets]


def run_case(engine_class: Any, desc: Any, case: Case) -> dict[str, str]:
    sources = {
        key: shards(desc, key, shape, dtype, case["axis"].get(key, 1), case["source_tp"])
        for key, (shape, dtype) in case["sources"].items()
    }
    wanted = case["targets"]
    targets = wanted and {
        key: shards(desc, key, shape, dtype, case["axis"].get(key, 1), case["target_tp"])
        for key, (shape, dtype) in wanted.items()
    }
    config = {"enable_traceback": False, **case["config"]}
    engine = engine_class(config, sources, targets)
    arrays = {key: source_array(key, *spec) for key, spec in case["sources"].items()}
    return {name: digest(filled(engine, desc, name, tensor, arrays, wanted)) for name, tensor in outputs(engine)}


def outputs(engine: Any) -> list[tuple[str, Any]]:
    return [(name, tensor) for name, tensor in engine.output_vars.items() if tensor is not None]


def filled(
    engine: Any, desc: Any, name: str, tensor: Any, arrays: dict[str, np.ndarray[Any, Any]], wanted: Any
) -> np.ndarray[Any, Any]:
    """Carry out the engine's plan for one target."""
    dtype = wanted[name][1] if wanted else last_dtype(tensor)
    shape = tuple(wanted[name][0]) if wanted else tuple(tensor.shape)
    out = np.full(shape, 99, dtype_of(dtype))
    covered = np.zeros(shape, bool)
    for entry in engine.find_shard_sources(desc(name, shape, shape, (0,) * len(shape), dtype)):
        part = arrays[entry.source_slice.key][index(entry.source_slice)]
        for step in entry.postprocess_list or ():
            part = part.transpose(ast.literal_eval(step)) if step.startswith("[") else part.astype(dtype_of(step))
        out[index(entry.target_slice)] = part
        covered[index(entry.target_slice)] = True
    if not covered.all():
        raise ValueError(f"{name}: the engine's plan leaves {int((~covered).sum())} elements as they were")
    return out


def last_dtype(tensor: Any) -> str:
    """The dtype that the engine casts a target to, or else that of its first source."""
    casts = [step for *_, steps in tensor.slices for step in steps or () if not step.startswith("[")]
    return casts[-1] if casts else tensor.dtype


def index(shard: Any) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(shard.global_offset, shard.local_shape, strict=True))


def main(folder: str, cases: str, results: str) -> None:
    engine_class, desc = open_engine(Path(folder))
    found: list[dict[str, Any]] = []
    for case in json.loads(Path(cases).read_text()):
        try:
            found.append({"targets": run_case(engine_class, desc, case)})
        except Exception as error:  # noqa: BLE001 - whatever the engine refuses a program with
            found.append({"error": f"{type(error).__name__}: {str(error)[:300]}"})
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
