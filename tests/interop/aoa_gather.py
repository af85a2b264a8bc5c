"""Gather AOA programs from PaddleFormers' models and from Paddle's own tests, as they are written there.

Nothing of either is installed or copied: PaddleFormers' methods `_gen_aoa_config` and `_gen_inv_aoa_config` are
evaluated from its wheel's sources, without the imports of their modules, for small configs of several kinds; and
Paddle's tests are run over an engine that takes notes of its arguments and does nothing.
"""

from __future__ import annotations

import ast
import json
import math
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

Spec = tuple[list[int], str]

METHODS = {"_gen_aoa_config": "forward", "_gen_inv_aoa_config": "inverse"}
HEADS, GROUPS, LAYERS, EXPERTS = 4, 2, 2, 4
BASE = {
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "hidden_size": 96,
    "n_routed_experts": EXPERTS, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "first_k_dense_replace": 1, "moe_layer_start_index": 1, "num_nextn_predict_layers": 0, "mtp_num_layers": 0,
    "num_empty_layers_add_in_head": 0, "tie_word_embeddings": False, "attention_bias": False, "use_bias": False,
    "qkv_bias": False, "use_qk_norm": True, "moe_expert_fusion": False, "using_sonic_moe": False, "fp8": False,
    "q_lora_rank": 24, "n_shared_experts": 1, "depth": 2, "num_heads": 4, "sliding_window": None, "head_dim": 24,
    "window_attn_skip_freq": None, "csa_compress_ratios": [4, 128], "tensor_model_parallel_size": 1, "softmax_type": "",
    "experimental_attention_variant": None, "moe_latent_size": None, "use_dense_mtp": False, "use_gated_attn": False,
    "use_vha_attention": False, "routed_scaling_factor_learnable": False, "moe_deep_gemm": False,
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": False, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "v_head_dim": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 12, "kv_lora_rank": 24,
    "linear_key_head_dim": 12, "linear_value_head_dim": 12, "out_hidden_size": 96,
    "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2, "intermediate_size": 192,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "use_bias": True, "qkv_bias": True},
    "experts in one": {"moe_expert_fusion": True, "fd_fallback": True},
    "predictor": {"num_nextn_predict_layers": 1, "mtp_num_layers": 1},
    "fleet": {"is_fleet": True, "moe_expert_fusion": True},
    "sonic fleet": {"is_fleet": True, "using_sonic_moe": True},
}
KEPT = ("base_model_prefix", "_checkpoint_conversion_mapping", "_tied_weights_keys")


@dataclass(frozen=True, slots=True)
class Gathered:
    """An AOA config and where it was found; `sources` and `targets` are the shapes that a test gave with it."""

    name: str
    config: dict[str, Any]
    sources: dict[str, Spec] | None = None
    targets: dict[str, Spec] | None = None
    direction: str = "forward"
    other: str = field(default="", compare=False)  # of a pair: what the other direction is called


class Config:
    """The attributes of a model's config; what it does not have is an AttributeError, as there."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name in ("text_config", "vision_config"):
            return self
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)


def from_formers(folder: Path) -> tuple[list[Gathered], list[str]]:
    """The programs of PaddleFormers' models in `folder`, and what could not be evaluated."""
    found: list[Gathered] = []
    left_out: list[str] = []
    seen: set[str] = set()
    for path in sorted(folder.glob("paddleformers/transformers/**/modeling*.py")):
        for model in _models(path, folder):
            for variant, more in VARIANTS.items():
                found += _programs(model, path.parent.name, variant, more, seen, left_out)
    return found, sorted(set(left_out))


def _programs(
    model: type, package: str, variant: str, more: dict[str, Any], seen: set[str], left_out: list[str]
) -> Iterator[Gathered]:
    model.is_fleet = bool(more.get("is_fleet"))  # type: ignore[attr-defined]
    title = f"{package}.{model.__name__}{f' ({variant})' if variant else ''}"
    for method, direction in METHODS.items():
        if not hasattr(model, method):
            continue
        try:
            config = getattr(model, method)(Config({**BASE, **more}))
        except (AttributeError, KeyError, NameError, TypeError, ValueError) as error:
            left_out.append(f"{title} {direction}: {type(error).__name__}: {error}")
            continue
        key = json.dumps([model.__name__, package, config], sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield Gathered(f"{title} {direction}", config, direction=direction, other=title)


def _models(path: Path, folder: Path) -> Iterator[type]:
    """The classes of a module that write AOA, with nothing but what they write it with."""
    text = path.read_text()
    if "_aoa_config" not in text:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in somebody else's strings
        tree = ast.parse(text)
    names: dict[str, Any] = {
        "math": math, "reduce": reduce, "is_layer_window_attention": lambda window, skip, layer: bool(window),
        "MoEAOAConfigGenerator": _generator(folder), "Any": Any, "logger": mock.MagicMock(),
    }  # fmt: skip
    mappings = [_literals(node) for node in tree.body if isinstance(node, ast.ClassDef)]
    usual = next((m["_checkpoint_conversion_mapping"] for m in mappings if m.get("_checkpoint_conversion_mapping")), {})
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and "aoa" in node.name:
            _evaluate(node, names)
        if isinstance(node, ast.ClassDef) and any(_is_method(item) for item in node.body):
            model = types.new_class(node.name)
            for name, value in {"_checkpoint_conversion_mapping": usual, "base_model_prefix": "model"}.items():
                setattr(model, name, value)
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and _is_helper(item):
                    _evaluate(item, names)
                    setattr(model, item.name, names[item.name])
            for name, value in _literals(node).items():
                setattr(model, name, value or getattr(model, name, value))
            model.base_model_class = object  # type: ignore[attr-defined]
            model._tied_weights_keys = ["lm_head.weight"]  # type: ignore[attr-defined]
            yield model


def _is_method(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name in METHODS


def _is_helper(node: ast.FunctionDef) -> bool:
    """A class or static method that a program may call: those of a model that only build text."""
    static = any(isinstance(d, ast.Name) and d.id in ("classmethod", "staticmethod") for d in node.decorator_list)
    return static and ("aoa" in node.name or "split_info" in node.name or "inject" in node.name)


def _literals(node: ast.ClassDef) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in node.body:
        if not (isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)):
            continue
        name = item.targets[0].id
        if name in KEPT or name.strip("_").isupper():
            out[name] = ast.literal_eval(item.value)
    return out


def _evaluate(node: ast.FunctionDef, names: dict[str, Any]) -> None:
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, node], []), node.name, "exec"), names)


def _generator(folder: Path) -> Any:
    path = folder / "paddleformers/transformers/aoa_config_base.py"
    if not path.exists():
        return None
    module = types.ModuleType("aoa_config_base")
    sys.modules["aoa_config_base"] = module  # dataclasses look their module up
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module.MoEAOAConfigGenerator


def from_tests(checkout: Path) -> tuple[list[Gathered], list[str]]:
    """The programs of Paddle's flex_checkpoint tests in a checkout of Paddle, and the files that did not run."""
    found: list[Gathered] = []
    left_out: list[str] = []
    for path in sorted(checkout.glob("test/flex_checkpoint/test_*.py")):
        text = path.read_text()
        if "aoa" not in text.lower():
            continue
        try:
            recorded = _recorded(path, text)
        except Exception as error:  # noqa: BLE001 - a test module of somebody else's: whatever it needs is not here
            left_out.append(f"{path.name}: {type(error).__name__}: {error}")
            continue
        if not recorded:
            left_out.append(f"{path.name}: no program in it without a process group")
        found += recorded
    return found, left_out


def _recorded(path: Path, text: str) -> list[Gathered]:
    recorder = _Recorder(path.stem)
    modules = {
        name: mock.MagicMock(AOAEngine=recorder, ShardedWeightDesc=Desc, ShardMappingEntry=mock.MagicMock())
        for name in ("aoa.aoa_engine", "dcp.sharded_weight", "aoa.lexer", "aoa.macros", "aoa.generation", "dcp.utils")
    }
    prefix = "paddle.distributed.flex_checkpoint"
    stubs = {f"{prefix}.{name}": module for name, module in modules.items()}
    for name in ("paddle", "paddle.distributed", prefix, f"{prefix}.aoa", f"{prefix}.dcp"):
        stubs[name] = mock.MagicMock()
    with mock.patch.dict(sys.modules, stubs):
        module = types.ModuleType(path.stem)
        exec(compile(text, str(path), "exec"), module.__dict__)
        recorder.take_macros(module)
        suite = unittest.TestLoader().loadTestsFromModule(module)
        suite.run(unittest.TestResult())  # its assertions are about the engine, which is not there
    return recorder.found


class Desc:
    """A shard as Paddle describes one."""

    def __init__(
        self, key: str, local_shape: Any, global_shape: Any, global_offset: Any, dtype: str | None = None
    ) -> None:
        self.key, self.global_shape, self.global_offset, self.dtype = key, global_shape, global_offset, dtype


class _Recorder:
    """Stands in for the engine, and keeps what it was given."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: list[Gathered] = []

    def __call__(
        self, aoa_config: dict[str, Any], source_state_shard_info: Any, destination_state_shard_info: Any
    ) -> mock.MagicMock:
        number = len(self.found)
        sources, targets = _specs(source_state_shard_info), _specs(destination_state_shard_info)
        program = Gathered(f"{self.name} {number}", json.loads(json.dumps(aoa_config)), sources, targets)
        if not any((p.config, p.sources, p.targets) == (program.config, sources, targets) for p in self.found):
            self.found.append(program)
        return mock.MagicMock()

    def take_macros(self, module: types.ModuleType) -> None:
        """The sources of macro tests, which have no shapes."""
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and hasattr(kind, "source_code"):
                try:
                    text = kind.source_code(kind())
                except NotImplementedError:
                    continue
                statements = [text] if isinstance(text, str) else list(text)
                self.found.append(Gathered(f"{self.name} {kind.__name__}", {"aoa_statements": statements}))


def _specs(info: Any) -> dict[str, Spec] | None:
    if not info:
        return None
    return {key: (list(found[0].global_shape), found[0].dtype or "float32") for key, found in info.items()}
