"""DTensor's dispatcher: operators by name, handler tables, overrides, the steps that unwrap, run and wrap a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from holdfast.spmd.base import torch_versions
from holdfast.spmd.base.call import writes_first
from holdfast.spmd.base.thread_caches import clear_every_thread

SLOW_PATH = "_propagate_op_sharding_dispatch_slow_path"
REPLICATE_PLAIN = "_try_replicate_spec_for_scalar_tensor"
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

Operator = Any  # torch._ops.OpOverload: not typed by torch
Handler = Callable[[Operator, tuple[object, ...], dict[str, object]], object]


def dispatcher() -> Any:
    """Return DTensor's only dispatcher."""
    return torch_versions.dtensor_api.DTensor._op_dispatcher


def takes_plain_tensors() -> bool:
    """Return True inside of torch's `implicit_replication()`: plain tensors beside DTensors count as replicas."""
    return bool(getattr(dispatcher(), "_allow_implicit_replication", False))


def operator(name: str) -> Operator | None:
    """Return the aten operator `name.overload`, or None if this torch lacks it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def operators(*prefixes: str) -> tuple[str, ...]:
    """Return the names, with overloads, of every aten operator whose name starts with one of `prefixes`."""
    names = (schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas())
    packets = sorted({name for name in names if name.startswith(prefixes)})
    return tuple(
        f"{packet}.{overload}"
        for packet in packets
        for overload in getattr(torch.ops.aten, packet).overloads()
        if not overload.endswith("out")
    )


def override(name: str, value: Any) -> None:
    """Shadow the dispatcher's method of that name with `value`."""
    setattr(dispatcher(), name, value)


def restore(name: str) -> None:
    """Undo `override`."""
    vars(dispatcher()).pop(name, None)


def handlers() -> dict[Operator, Handler]:
    """Return the dispatcher's table of operators that bypass sharding propagation."""
    return dispatcher()._custom_op_handlers  # type: ignore[no-any-return]


def loss_parallel_table() -> dict[Operator, Handler]:
    """Return the handlers that torch's loss_parallel installs; none if this torch keeps them elsewhere."""
    return getattr(torch_versions.loss_module, "customized_loss_ops", {})


def in_loss_parallel() -> bool:
    """Return True within torch's loss_parallel."""
    return any(op in handlers() for op in loss_parallel_table())


def functions_to_patch() -> list[tuple[str, Any, str]]:
    """Return the private functions to replace: the role of each, the module that looks it up, and its name."""
    grouping, redistribution = "_group_tensors_by_device_and_dtype", "redistribute_local_tensor"
    clipping = sys.modules["torch.nn.utils.clip_grad"]
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    functions = [
        ("grouping", sys.modules["torch.optim.optimizer"], grouping),
        ("grouping", clipping, grouping),
        ("grouping", sys.modules.get("torch.optim.swa_utils"), grouping),
        ("lists", sys.modules.get("torch.optim._adafactor"), "_group_tensors_by_device_dtype_and_is_multidim"),
        ("total_norm", clipping, "_get_total_norm"),
        ("clip", clipping, "_clip_grads_with_norm_"),
        *(
            (role, sys.modules[f"torch.distributed.tensor.{module}"], redistribution)
            for role in ("strided_shards", "half_norms", "strides")
            for module in ("_dispatch", "_redistribute")
        ),
        ("unshard", getattr(fsdp, "FSDPParamGroup", None), "unshard"),
        ("guards", sys.modules.get("torch._dynamo.guards"), "check_dtensor_spec"),
        *([("equal_specs", torch_versions.DTensorSpec, "_check_equals")] if torch_versions.is_torch_2_11() else []),
    ]
    return [entry for entry in functions if hasattr(entry[1], entry[2])]


def clear_decision_caches() -> bool:
    """Clear every thread's cache of sharding decisions; return False if only this thread's could be cleared."""
    torch_versions._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    return clear_every_thread()


def slow_path() -> Callable[..., Any]:
    """Return the method that the dispatcher calls on a cache miss."""
    return getattr(dispatcher(), SLOW_PATH)  # type: ignore[no-any-return]


def global_outputs(op_info: Any) -> Any:
    """Return shape, stride and dtype of a call's outputs on one device."""
    return dispatcher().sharding_propagator._propagate_tensor_meta_non_cached(op_info.schema)


def is_view(op: Operator) -> bool:
    """Return True if the results of `op` are views of its first argument."""
    schema = op._schema
    if not schema.arguments or not schema.returns:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and not alias.is_write


def written_positions(op: Operator) -> frozenset[int]:
    """Return the positions of the arguments that `op` writes."""
    aliases = (argument.alias_info for argument in op._schema.arguments)
    return frozenset(position for position, alias in enumerate(aliases) if alias is not None and alias.is_write)


def is_plain_call(op: Operator) -> bool:
    """Return True for an operator that is not in place, an out variant, random or a view."""
    schema = op._schema
    if schema.is_mutable or is_view(op) or not schema.returns:
        return False
    return op not in dispatcher()._random_ops and op is not torch.ops.aten.equal.default


def is_composite(op: Operator) -> bool:
    """Return True for a composite operator without a rule of torch; DTensor sees these only in inference mode."""
    known, has_kernel = dispatcher().sharding_propagator, torch._C._dispatch_has_kernel_for_dispatch_key
    tables = (known.op_strategy_funcs, getattr(known, "op_single_dim_strategy_funcs", ()))
    return has_kernel(op.name(), COMPOSITE) and not any(op in table for table in tables)


def run_decomposed(op: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Run a composite operator through its C++ decomposition, without version counters on its views.

    Tensors made outside of inference mode cannot count versions there. A Python kernel, where there is one, is for
    traces and makes plain tensors.
    """
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)):
        return op._op_dk(COMPOSITE, *args, **kwargs)


def unwrap(op: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Return the dispatcher's own description of a call."""
    return dispatcher().unwrap_to_op_info(op, args, kwargs)


def local_results(op: Operator, args: tuple[object, ...], info: Any) -> Any:
    """Execute the sharding in `info` on this rank: redistribute the inputs, then call the kernel."""
    return dispatcher()._dispatch_get_local_results_slow_path(op, args, info)


def local_inputs(info: Any) -> list[Any]:
    """Return the tensors that this rank's kernel was called with."""
    return [value for value in info.local_args if isinstance(value, torch.Tensor)]


def run_kernel(op: Operator, info: Any, change: Callable[[Any], Any]) -> Any:
    """Call the kernel again as `local_results` called it, with `change` applied to every argument."""
    args = [change(value) for value in info.local_args]
    if info.args_tree_spec is not None:
        args = list(torch_versions.tree_unflatten(args, info.args_tree_spec))
    return op(*args, **info.local_kwargs)


def wrap_results(local: Any, spec: Any) -> Any:
    return dispatcher().wrap(local, spec)


def finish(op: Operator, args: tuple[object, ...], kwargs: dict[str, object], info: Any, local: Any) -> Any:
    """Return a call's result after its kernel ran: the tensor written in place, or the wrapped results."""
    if writes_first(op):
        return dispatcher()._dispatch_fast_path_python_tail(
            op, args, kwargs, info.compute_mesh, info.output_sharding, local, True, True, False
        )
    return wrap_results(local, info.output_sharding.output_spec)


def process_group(name: Any) -> Any:
    """Return the process group that a functional collective names."""
    return torch._C._distributed_c10d._resolve_process_group(name)
