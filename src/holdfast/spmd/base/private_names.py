"""The table of torch's private names that the rules build on, and the check of each by `enable()`.

A patch release may change any of them. A name that is missing, or takes other parameters, leaves out the group that
needs it: all rules if the dispatcher differs, else one group of replacements.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

TENSOR = "torch.distributed.tensor"
FSDP = "torch.distributed.fsdp._fully_shard"
DISPATCHER = f"{TENSOR}._dispatch:OpDispatcher"
PROPAGATOR = f"{TENSOR}._sharding_prop:ShardingPropagator"
RULES = "rules"  # without these names no rule can be installed


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name of torch: the group that needs it, its path, and the parameters that it is called with."""

    part: str
    path: str  # "module:name.name"
    parameters: tuple[str, ...] | None = None  # the first ones, in order; more may follow if they have defaults


NAMES = (
    PrivateName(
        RULES,
        f"{DISPATCHER}._propagate_op_sharding_dispatch_slow_path",
        ("self", "op_call", "args", "kwargs", "op_info", "try_cache"),
    ),
    PrivateName(RULES, f"{DISPATCHER}._dispatch_get_local_results_slow_path", ("self", "op_call", "args", "op_info")),
    PrivateName(
        RULES,
        f"{DISPATCHER}._dispatch_fast_path_python_tail",
        (
            *("self", "op_call", "args", "kwargs", "compute_mesh", "output_sharding", "local_results"),
            *("participating", "is_inplace_op", "is_out_variant_op"),
        ),
    ),
    PrivateName(RULES, f"{DISPATCHER}.unwrap_to_op_info", ("self", "op_call", "args", "kwargs")),
    PrivateName(RULES, f"{DISPATCHER}.wrap", ("res", "spec")),
    PrivateName(RULES, f"{PROPAGATOR}.propagate_op_sharding_non_cached", ("self", "op_schema")),
    PrivateName(RULES, f"{PROPAGATOR}._propagate_tensor_meta_non_cached", ("self", "op_schema")),
    PrivateName(RULES, f"{TENSOR}._dtensor_spec:DTensorSpec", ("mesh", "placements", "tensor_meta")),
    PrivateName(RULES, f"{TENSOR}._dtensor_spec:TensorMeta", ("shape", "stride", "dtype")),
    PrivateName(RULES, f"{TENSOR}._op_schema:OutputSharding"),
    PrivateName(RULES, f"{TENSOR}._ops._math_ops:_NormPartial", ("norm_type",)),
    PrivateName(
        RULES,
        f"{TENSOR}._redistribute:redistribute_local_tensor",
        ("local_tensor", "current_spec", "target_spec"),
    ),
    PrivateName(
        RULES,
        f"{TENSOR}._utils:compute_local_shape_and_global_offset",
        ("global_shape", "mesh", "placements"),
    ),
    PrivateName(RULES, f"{TENSOR}.placement_types:Shard._split_tensor", ("self", "tensor", "num_chunks")),
    PrivateName(RULES, f"{TENSOR}.placement_types:_StridedShard._split_tensor", ("self", "tensor", "num_chunks")),
    PrivateName(RULES, f"{TENSOR}.debug:_clear_sharding_prop_cache", ()),
    PrivateName(RULES, "torch.distributed._functional_collectives:_are_we_tracing", ()),
    PrivateName(RULES, "torch._subclasses.fake_tensor:DataDependentOutputException"),
    PrivateName(RULES, "torch._subclasses.fake_tensor:DynamicOutputShapeException"),
    PrivateName(RULES, "torch._subclasses.fake_tensor:UnsupportedFakeTensorException"),
    PrivateName(RULES, "torch._subclasses.fake_tensor:UnsupportedOperatorException"),
    PrivateName(RULES, "torch.fx.experimental.symbolic_shapes:GuardOnDataDependentSymNode"),
    PrivateName(RULES, "torch.fx.experimental.symbolic_shapes:guard_or_false", ("a",)),
    PrivateName(RULES, "torch._C._dynamo.eval_frame:set_code_exec_strategy"),
    PrivateName(RULES, "torch._C._dynamo.eval_frame:_FrameExecStrategy"),
    PrivateName(RULES, "torch._C._dynamo.eval_frame:_FrameAction.SKIP"),
    PrivateName(RULES, "torch.utils._mode_utils:no_dispatch", ()),
    PrivateName(RULES, "torch:_C._current_autograd_node"),
    PrivateName(RULES, "torch.autograd.grad_mode:_unsafe_preserve_version_counter", ("tensors",)),
    PrivateName(RULES, "torch:_C._jit_get_all_schemas"),
    PrivateName(RULES, "torch:_C._dispatch_has_kernel_for_dispatch_key"),
    PrivateName(RULES, "torch:_C._ExcludeDispatchKeyGuard"),
    PrivateName(RULES, "torch:_C._distributed_c10d._resolve_process_group"),
    PrivateName(RULES, "torch:ops.aten.add.Tensor._op_dk"),
    PrivateName(RULES, f"{TENSOR}:DTensor._op_dispatcher._custom_op_handlers"),
    PrivateName(RULES, f"{TENSOR}:DTensor._op_dispatcher._random_ops"),
    PrivateName(RULES, f"{TENSOR}:DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs"),
    PrivateName(
        "plain",
        f"{DISPATCHER}._try_replicate_spec_for_scalar_tensor",
        ("self", "op_call", "tensor_arg", "compute_mesh"),
    ),
    PrivateName("loss_parallel", f"{TENSOR}.parallel.loss:customized_loss_ops"),
    PrivateName("fallback", f"{TENSOR}._ops.utils:is_tensor_shardable", ("shape", "spec")),
    PrivateName("fallback", f"{TENSOR}._ops._matrix_ops:is_tensor_shardable", ("shape", "spec")),
    *(
        PrivateName(part, f"torch.jit._builtins:{name}", parameters)
        for part in ("fallback", "functions", "methods")  # each replaces functions of torch
        for name, parameters in (
            ("_find_builtin", ("fn",)),
            ("_register_builtin", ("fn", "op")),
            ("_get_builtin_table", ()),
        )
    ),
    PrivateName("methods", "torch._dynamo.guards:GuardBuilder.DTENSOR_SPEC_MATCH", ("self", "guard")),
    PrivateName(
        "methods", "torch.utils._foreach_utils:_group_tensors_by_device_and_dtype", ("tensorlistlist", "with_indices")
    ),
    PrivateName(
        "methods", "torch.nn.utils.clip_grad:_get_total_norm", ("tensors", "norm_type", "error_if_nonfinite", "foreach")
    ),
    PrivateName(
        "methods",
        "torch.nn.utils.clip_grad:_clip_grads_with_norm_",
        ("parameters", "max_norm", "total_norm", "foreach"),
    ),
    PrivateName("methods", f"{FSDP}._fsdp_param_group:FSDPParamGroup.unshard", ("self",)),
    PrivateName("methods", f"{FSDP}._fsdp_param_group:FSDPParamGroup.is_sharded"),
    PrivateName("methods", f"{FSDP}._fsdp_param:FSDPParam.reset_sharded_param", ("self",)),
)


def mismatches(names: tuple[PrivateName, ...] = NAMES) -> dict[str, list[str]]:
    """Return the names that differ from what is expected, in words, by the group that needs them."""
    problems: dict[str, list[str]] = {}
    for name in names:
        problem = _problem(name)
        if problem:
            problems.setdefault(name.part, []).append(problem)
    return problems


def _problem(name: PrivateName) -> str:
    try:
        value = _find(name.path)
    except (ImportError, AttributeError):
        return f"{_title(name)} is missing"
    if name.parameters is None:
        return ""
    try:
        present = list(inspect.signature(value).parameters.values())
    except ValueError:  # written in C++: it has no signature to compare
        return ""
    first = tuple(parameter.name for parameter in present[: len(name.parameters)])
    required = [one.name for one in present[len(name.parameters) :] if one.default is one.empty and one.kind < 2]
    if first == name.parameters and not required:
        return ""
    return f"{_title(name)} takes ({', '.join(one.name for one in present)}), not ({', '.join(name.parameters)})"


def _title(name: PrivateName) -> str:
    return name.path.replace(":", ".")


def _find(path: str) -> Any:
    module, _, attributes = path.partition(":")
    value: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        value = getattr(value, attribute)
    return value
