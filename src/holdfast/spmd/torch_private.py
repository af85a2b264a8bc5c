"""Every private name of torch that holdfast.spmd touches, and what is known of each torch version.

What is not known: how DTensor dispatches on a version outside KNOWN. `check` says so, and `enable` then installs
nothing rather than guess. Within a known version a missing name of one operator leaves out that operator's rule only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from holdfast.spmd.private_names import RULES, misfits
from holdfast.spmd.stand_ins import StandIn
from holdfast.spmd.thread_caches import clear_every_thread

try:
    from torch._C._dynamo import eval_frame
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )
    from torch.distributed._functional_collectives import _are_we_tracing
    from torch.distributed.tensor import _api as dtensor_api
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OutputSharding
    from torch.distributed.tensor._ops import _matrix_ops, utils
    from torch.distributed.tensor._redistribute import redistribute_local_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.distributed.tensor.parallel import loss as loss_module
    from torch.fx.experimental.symbolic_shapes import guard_or_false
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._pytree import tree_leaves
except ImportError as error:
    MISSING = f"torch {torch.__version__} lacks what holdfast.spmd builds on: {error}"
else:
    MISSING = ""

    class _SpecApart(DTensorSpec):
        """A spec that equals itself only: no cached decision fits it, so that the slow path is asked."""

        def __eq__(self, other: object, /) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)


KNOWN = ("2.11", "2.12", "2.13")
VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
AT_LEAST_2_13 = VERSION >= (2, 13)
SLOW_PATH = "_propagate_op_sharding_dispatch_slow_path"
REPLICATE = Replicate()
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
REPLICATE_PLAIN = "_try_replicate_spec_for_scalar_tensor"

Operator = Any  # torch._ops.OpOverload: not typed by torch
Handler = Callable[[Operator, tuple[object, ...], dict[str, object]], object]


def check() -> str | None:
    """Why this torch cannot be served, or None."""
    if MISSING:
        return MISSING
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in KNOWN:
        return f"torch {version} is not known to holdfast.spmd (known: {', '.join(KNOWN)}): no rule is installed"
    if not hasattr(dispatcher(), "_custom_op_handlers"):
        return f"torch {torch.__version__} has no table of handlers in DTensor's dispatcher: no rule is installed"
    problems = "; ".join(misfits().get(RULES, ()))
    return f"torch {torch.__version__} is not as expected: {problems}: no rule is installed" if problems else None


def dispatcher() -> Any:
    """DTensor's one dispatcher."""
    return dtensor_api.DTensor._op_dispatcher


def operator(name: str) -> Operator | None:
    """The aten operator `name.overload`, or None where this torch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def operators(prefix: str) -> tuple[str, ...]:
    """The names, with their overloads, of every aten operator whose name begins so."""
    names = (schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas())
    packets = sorted({name for name in names if name.startswith(prefix)})
    return tuple(
        f"{packet}.{overload}"
        for packet in packets
        for overload in getattr(torch.ops.aten, packet).overloads()
        if not overload.endswith("out")
    )


def override(name: str, value: Any) -> None:
    """Put `value` before the dispatcher's own method of that name."""
    setattr(dispatcher(), name, value)


def restore(name: str) -> None:
    """Take away what `override` put there."""
    vars(dispatcher()).pop(name, None)


def handlers() -> dict[Operator, Handler]:
    """The dispatcher's table of operators that bypass sharding propagation."""
    return dispatcher()._custom_op_handlers  # type: ignore[no-any-return]


def loss_parallel_table() -> dict[Operator, Handler]:
    """What torch's loss_parallel puts into the table of handlers."""
    return loss_module.customized_loss_ops  # type: ignore[return-value]


def in_loss_parallel() -> bool:
    """Whether torch's loss_parallel is on."""
    return any(op in handlers() for op in loss_parallel_table())


def functions() -> list[tuple[str, Any, str]]:
    """Functions that DTensor and optimizers call: what each does, the module whose name is looked up, the name."""
    grouping, moving = "_group_tensors_by_device_and_dtype", "redistribute_local_tensor"
    clipping = sys.modules["torch.nn.utils.clip_grad"]
    found = [
        ("grouping", sys.modules["torch.optim.optimizer"], grouping),
        ("grouping", clipping, grouping),
        ("grouping", sys.modules.get("torch.optim.swa_utils"), grouping),
        ("lists", sys.modules.get("torch.optim._adafactor"), "_group_tensors_by_device_dtype_and_is_multidim"),
        ("total_norm", clipping, "_get_total_norm"),
        ("clip", clipping, "_clip_grads_with_norm_"),
        ("strides", sys.modules["torch.distributed.tensor._dispatch"], moving),
        ("strides", sys.modules["torch.distributed.tensor._redistribute"], moving),
    ]
    return [entry for entry in found if hasattr(entry[1], entry[2])]


def forget_decisions() -> bool:
    """Drop the cached sharding decisions, made under other rules, of every thread; False if of this one only."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    return clear_every_thread()


def spec_of(tensor: DTensor) -> Any:
    return tensor._spec


def slow_path() -> Callable[..., Any]:
    """What the dispatcher asks where its cache has no answer."""
    return getattr(dispatcher(), SLOW_PATH)  # type: ignore[no-any-return]


def in_gradient(of: str = "") -> bool:
    """Whether autograd is calling (for nodes whose name begins so): what it makes, it makes alike on every rank."""
    return (node := torch._C._current_autograd_node()) is not None and (not of or node.name().startswith(of))


def local_of(tensor: DTensor) -> torch.Tensor:
    """The rank's own tensor, outside of autograd."""
    return tensor._local_tensor


def replace_contents(tensor: DTensor, local: torch.Tensor, placements: Sequence[Placement]) -> None:
    """Make `tensor` hold other contents under other placements: what an in-place call on a Partial has to do."""
    spec = make_spec(tensor.device_mesh, placements, tensor.shape, tensor.stride(), local.dtype)
    tensor._local_tensor = local
    tensor._spec = apart(spec) if isinstance(tensor._spec, _SpecApart) else spec


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Any:
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


def redistribute_local(tensor: DTensor, placements: Sequence[Placement]) -> torch.Tensor:
    """What this rank holds of `tensor` under other placements; collective."""
    spec = spec_of(tensor)
    pairs = zip(spec.placements, placements, strict=True)
    way = tuple(REPLICATE if then.is_partial() and now.is_shard() else then for now, then in pairs)
    if way != tuple(placements):  # torch makes no shards into parts at once
        spec = DTensorSpec(spec.mesh, way, tensor_meta=spec.tensor_meta)
        tensor = wrap(redistribute_local(tensor, way), spec)
    target = DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
    moved: torch.Tensor = redistribute_local_tensor(local_of(tensor), spec, target)
    moved = moved.wait() if hasattr(moved, "wait") else moved
    return moved.contiguous() if tensor.is_contiguous() else moved  # 2.11 gathers other dims than the first transposed


def wrap(local: torch.Tensor, spec: Any) -> DTensor:
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and offsets of this rank's box of a tensor of `shape`."""
    with no_dispatch() if is_tracing() else nullcontext():  # a trace would record the small tensors torch counts with
        sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, tuple(placements))
    return tuple(sizes), tuple(offsets)


def global_outputs(op_info: Any) -> Any:
    """Shape, stride and dtype of a call's outputs on one device."""
    return dispatcher().sharding_propagator._propagate_tensor_meta_non_cached(op_info.schema)


def is_decision(value: Any) -> bool:
    """Whether the slow path answered with a sharding, and not with a result."""
    return isinstance(value, OutputSharding)


def is_plain_call(op: Operator) -> bool:
    """Neither in place, nor into a given result, nor random, nor a view: its results can be wrapped as they are."""
    schema = op._schema
    if schema.is_mutable or is_view(op) or not schema.returns:
        return False
    return op not in dispatcher()._random_ops and op is not torch.ops.aten.equal.default


def local_results(op: Operator, args: tuple[object, ...], info: Any) -> Any:
    """Carry out the sharding in `info` on this rank: move the inputs, call the kernel."""
    return dispatcher()._dispatch_get_local_results_slow_path(op, args, info)


def local_inputs(info: Any) -> list[Any]:
    """What this rank's kernel was given."""
    return [part for part in info.local_args if isinstance(part, torch.Tensor)]


def wrap_results(local: Any, spec: Any) -> Any:
    return dispatcher().wrap(local, spec)


def unwrap(op: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """The dispatcher's own description of a call."""
    return dispatcher().unwrap_to_op_info(op, args, kwargs)


def finish(op: Operator, args: tuple[object, ...], kwargs: dict[str, object], info: Any, local: Any) -> Any:
    """What torch returns once the kernel has run: the written tensor of an in-place call, or wrapped results."""
    if op._schema.is_mutable:
        return dispatcher()._dispatch_fast_path_python_tail(
            op, args, kwargs, info.compute_mesh, info.output_sharding, local, True, True, False
        )
    return wrap_results(local, info.output_sharding.output_spec)


def is_view(op: Operator) -> bool:
    """Whether the results of `op` are views of its first argument."""
    schema = op._schema
    if not schema.arguments or not schema.returns:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and not alias.is_write


def moves_first(sharding: Any, info: Any) -> bool:
    """Whether carrying out a decision changes the placements of the first argument."""
    wanted = sharding.redistribute_schema
    if not sharding.needs_redistribute or wanted is None:
        return False
    present, after = info.schema.args_schema[0], wanted.args_schema[0]
    return getattr(present, "placements", None) != getattr(after, "placements", None)


def wrap_as(kind: type, local: torch.Tensor, spec: Any) -> Any:
    """A DTensor of a subclass."""
    return kind(local, spec, requires_grad=False)


def written(op: Operator) -> frozenset[int]:
    """The positions of the arguments that `op` writes into."""
    aliases = (argument.alias_info for argument in op._schema.arguments)
    return frozenset(position for position, alias in enumerate(aliases) if alias is not None and alias.is_write)


def memory_of(tensor: torch.Tensor) -> int:
    """Which memory a tensor's values lie in: alike for a tensor and its detach(), on a rank with an empty shard too."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)


def will_count(op: Operator, view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether torch counts what `op` writes into `view` as a write into `base`, once the call is done.

    It does not for .data of a view, nor for the foreach and fused operators.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.ADInplaceOrView):
        return False
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(base):
        before = view._version
        torch.autograd.graph.increment_version(base)
        return view._version != before


def is_oldest() -> bool:
    """Whether this is torch 2.11, which asks no subclass of DTensor, and some of whose rules were mended later."""
    return torch.__version__.startswith("2.11")


def apart(spec: Any) -> Any:
    """The same spec, but on torch 2.11 one that the dispatcher's cache never knows: see `is_oldest`."""
    return _SpecApart(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta) if is_oldest() else spec


def common(spec: Any) -> Any:
    """The spec that `apart` was given."""
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta) if is_oldest() else spec


def turn(
    op: Operator, tensor: DTensor, local: torch.Tensor, placements: Sequence[Placement], rest: tuple[Any, ...]
) -> None:
    """Carry out an in-place change of shape: on the wrapper itself, and with another local tensor."""
    with no_dispatch():
        op(tensor, *rest)
    tensor._local_tensor = local
    tensor._spec = make_spec(tensor.device_mesh, placements, tensor.shape, tensor.stride(), local.dtype)


def decided_specs(sharding: Any) -> list[Any]:
    """The specs of the inputs as a decision will have moved them; none where nothing moves."""
    if not sharding.needs_redistribute or sharding.redistribute_schema is None:
        return []
    return specs_in(sharding.redistribute_schema.args_schema)


class _Patience(threading.local):
    """Whether this thread asks for decisions that give some rank an empty shard, which torch never makes."""

    asked = False


PATIENCE = _Patience()
SHARDABLE = "is_tensor_shardable"
ATEN = torch.ops.aten  # whose sums of nothing are zero
SUMS = (ATEN.sum.default, ATEN.sum.dim_IntList, ATEN.mm.default, ATEN.native_layer_norm_backward.default)


def allow_empty_shards() -> list[StandIn]:
    """Let `quiet_decision` ask for what torch's strategies otherwise leave out."""

    def make(torch_way: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *args, **kwargs: PATIENCE.asked or torch_way(*args, **kwargs)

    return [StandIn(module, SHARDABLE, make) for module in (utils, _matrix_ops)]


def decision(info: Any) -> Any:
    """What torch decides for a call; None where it has no answer."""
    try:
        return dispatcher().sharding_propagator.propagate_op_sharding_non_cached(info.schema)
    except Exception:  # noqa: BLE001 - whatever stops torch here, there is no such decision
        return None


def quiet_decision(info: Any) -> Any:
    """torch's decision as it would be if empty shards did not matter; None unless it needs no communication at all."""
    if not AT_LEAST_2_13:  # strategies were written by hand then, and some count on shards that are not empty
        return None
    PATIENCE.asked = True
    try:
        sharding = decision(info)
    finally:
        PATIENCE.asked = False
    outputs = [] if sharding is None else specs_in(sharding.output_spec)
    if not outputs or needs_talk(sharding, info):
        return None
    parts = [place for spec in outputs for place in spec.placements if place.is_partial()]
    return sharding if all(info.schema.op in SUMS and place.reduce_op == "sum" for place in parts) else None


def needs_talk(sharding: Any, info: Any) -> bool:
    """Whether carrying out a decision moves anything but slices of what every rank has."""
    wanted = sharding.redistribute_schema
    if not sharding.needs_redistribute or wanted is None:
        return False
    before, after = specs_in(info.schema.args_schema), specs_in(wanted.args_schema)
    return any(
        present != then and not present.is_replicate()
        for here, there in zip(before, after, strict=True)
        for present, then in zip(here.placements, there.placements, strict=True)
    )


def specs_in(values: Any) -> list[Any]:
    """Every spec in nested arguments or results."""
    leaves = tree_leaves(values, is_leaf=lambda item: isinstance(item, DTensorSpec))
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def insist(conditions: torch.Tensor, message: str) -> None:
    """Raise unless all hold; on a GPU as its kernels do, later and without waiting."""
    torch._assert_async(conditions.all(), message)


def is_tracing() -> bool:
    """Whether torch.compile or export is looking: rules read values, which a trace has not."""
    return bool(_are_we_tracing())


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be read now: not in a trace, nor on a GPU, which the CPU would wait for."""
    return tensor.device.type == "cpu" and not is_tracing()


def is_known_true(condition: Any) -> bool:
    """Whether a condition on symbolic sizes holds for those traced, which becomes a guard; False if nobody knows."""
    return bool(guard_or_false(condition))


def out_of_graph(op: Operator) -> Exception:
    """The error by which torch.compile learns that a call is to run outside of the graph; in fake modes, an error."""
    return UnsupportedOperatorException(op)


def leaves_graph(error: Exception) -> bool:
    """Whether an error makes torch.compile break the graph."""
    return isinstance(error, (UnsupportedOperatorException, DataDependentOutputException, DynamicOutputShapeException))


def keep_out_of_dynamo(function: Callable[..., Any]) -> None:
    """Let no frame of a function, nor of what it calls, be compiled: it runs eagerly between graphs."""
    skipped = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(getattr(function, "__func__", function).__code__, skipped)


def simulates_ranks() -> bool:
    """Whether torch's LocalTensorMode runs every rank in this process: a rank's coordinate is then no number."""
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and module.local_tensor_mode() is not None


def own_coordinate(mesh: DeviceMesh) -> list[int]:
    """This rank's place on each axis of a mesh that it is on; raises where torch simulates all ranks at once.

    A coordinate is then a number for each rank, and a comparison of it with 0 is False for all, also the first.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None or simulates_ranks():
        raise RuntimeError(f"no rank of {mesh} alone runs here")
    return list(coordinate)


def is_composite(op: Operator) -> bool:
    """Whether `op` is made of others, and torch has no rule for it: only in inference mode does DTensor meet it."""
    known, has_kernel = dispatcher().sharding_propagator, torch._C._dispatch_has_kernel_for_dispatch_key
    tables = (known.op_strategy_funcs, getattr(known, "op_single_dim_strategy_funcs", ()))
    return has_kernel(op.name(), COMPOSITE) and not any(op in table for table in tables)


def take_apart(op: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Call the parts of a composite; their views count no versions: those of tensors from outside of inference cannot.

    With C++'s kernel for it: where there is one of Python, that is for traces and makes plain tensors.
    """
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)):
        return op._op_dk(COMPOSITE, *args, **kwargs)


def group_named(name: Any) -> Any:
    """The process group that a collective is called with."""
    return torch._C._distributed_c10d._resolve_process_group(name)


def decided_reshape(info: Any) -> tuple[Any, Any] | None:
    """The specs before and after a reshape as torch decides it; None where it does not."""
    if (sharding := decision(info)) is None:
        return None
    moved = decided_specs(sharding)
    return (moved[0] if moved else info.schema.args_schema[0]), sharding.output_spec
