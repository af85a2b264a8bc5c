"""Rules within a trace, after one, and in threads that used DTensors before `enable()`."""

from __future__ import annotations

import queue
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from holdfast.spmd.base.torch_versions import AT_LEAST_2_13, is_torch_2_11
from tests.dist.harness import run_ranks


def _written(x):
    y = x.clone()
    y[2:3] = 0.0
    return y


CALLS = {
    "cumsum": lambda x: x.cumsum(-2),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 0.5),
    "softmax": lambda x: x.softmax(0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "logsumexp": lambda x: x.logsumexp(0),
    "argmax": lambda x: x.argmax(0),
    "index": lambda x: x[[3, 1, 6]],
    "write": _written,
    "amin": lambda x: x.amin(),
    "slice": lambda x: x[0:1] * 2 + x[-1:],
    "chunk": lambda x: x.chunk(2)[0] * 2,
}
ROWS = {"even": 8, "uneven": 7, "few": 1}


SLICES = 4


def _gaps(backend, slice_number):
    """For every fourth call and each size: how far a compiled call, and an eager one after it, are from one device."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, found = init_device_mesh("cpu", (2,)), {}
    sizes = ROWS if backend == "aot_eager" else {"uneven": 7}
    for size, rows in sizes.items():
        whole = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for name, call in list(CALLS.items())[slice_number::SLICES]:
            if name == "index" and rows < 7:
                continue
            for places in ([Shard(0)], [Partial()]):
                found[f"{name} {size} {places[0]}"] = _gap(call, whole, mesh, places, backend)
    return {title: gap for title, gap in found.items() if not max(gap) < 1e-10}


def _gap(call, whole, mesh, places, backend):
    torch._dynamo.reset()
    results = []
    for run in (call, torch.compile(call, backend=backend), call):
        if not results:
            leaf = whole.clone().requires_grad_()
        elif places[0].is_partial():
            leaf = DTensor.from_local(whole / 2, mesh, places, run_check=False).detach().requires_grad_()
        else:
            leaf = distribute_tensor(whole, mesh, places).requires_grad_()
        out = run(leaf)
        if out.is_floating_point():
            (out * out).sum().backward()
        results.append([out, leaf.grad])
    expected = results.pop(0)
    return [max(map(_distance, found, expected)) for found in results]


def _distance(found, expected):
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return float((found.double() - expected.double()).abs().max())


@pytest.mark.sliced(2)
@pytest.mark.parametrize("slice_number", range(SLICES))
def test_a_traced_call_and_the_call_after_it_are_right(slice_number):
    assert run_ranks(2, _gaps, "eager", slice_number, deadline_s=240) == [{}, {}]


@pytest.mark.sliced(SLICES)
@pytest.mark.parametrize("slice_number", range(SLICES))
def test_a_compiled_region_is_right(slice_number):
    assert run_ranks(2, _gaps, "aot_eager", slice_number, deadline_s=240) == [{}, {}]


def _in_old_thread():
    """The same call in a thread: before the rules, with them, and after them."""
    import holdfast.spmd

    holdfast.spmd.disable()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    orders, answers = queue.Queue(), queue.Queue()

    def work():
        while orders.get():
            answers.put(tensor.cumsum(-2).full_tensor())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    found = []
    for change in (holdfast.spmd.disable, holdfast.spmd.enable, holdfast.spmd.disable):
        change()
        orders.put(True)
        found.append(torch.allclose(answers.get(timeout=60), whole.cumsum(-2)))
    orders.put(False)
    thread.join(60)
    return found


def test_a_thread_that_used_dtensors_before_has_the_rules():
    assert run_ranks(2, _in_old_thread, deadline_s=120) == [[False, True, False]] * 2


DYNAMIC = {
    "mul": lambda x: x * x,
    "cat": lambda x: torch.cat((x, x), dim=1),
    "matmul": lambda x: x @ x.new_ones(x.shape[1], 3),
    "detach": lambda x: x.detach() + x,
}


def _dynamic():
    """With symbolic sizes: what torch alone has in one graph stays in one, and every size is right."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for name, call in {**DYNAMIC, **CALLS}.items():
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", dynamic=True, fullgraph=name in DYNAMIC)
        for rows in (8, 12, 7, 4):
            whole = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            if name == "index" and rows < 7:
                continue
            gap = _distance(compiled(distribute_tensor(whole, mesh, [Shard(0)])), call(whole))
            if not gap < 1e-10:
                found[f"{name} {rows}"] = gap
    return found


@pytest.mark.full
def test_symbolic_sizes_stay_in_the_graph_and_are_right():
    assert run_ranks(2, _dynamic, deadline_s=240) == [{}, {}]


def _unbacked():
    """Replicated tensors of sizes that no trace knows: one graph, as with torch alone."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, found = init_device_mesh("cpu", (2,)), {}
    whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name in ("cumsum", "softmax", "argmax", "amin", "mse_loss"):
        torch._dynamo.reset()
        tensor = distribute_tensor(whole, mesh, [Replicate()])
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
        compiled = torch.compile(CALLS[name], backend="eager", fullgraph=True)
        found[name] = _distance(compiled(tensor), CALLS[name](whole))
    return {name: gap for name, gap in found.items() if not gap < 1e-10}


@pytest.mark.full
def test_replicated_tensors_of_unknown_sizes_stay_in_the_graph():
    assert run_ranks(2, _unbacked, deadline_s=120) == [{}, {}]


def _without_values():
    """Return the calls that are wrong, or their gradients; index_put looks at its indices, so it leaves the graph."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (4,)), []
    whole = torch.randn(12, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    target = torch.tensor([0, 3, -100, 5, 1, 1, 2, -100, 4, 0, 3, 2])
    weight = torch.arange(1.0, 7.0, dtype=torch.float64)
    calls = {  # rows that ranks fetch from each other; a loss with class weights and ignored targets; rows put
        "flip": lambda x, *_: x.flip(0),
        "roll": lambda x, *_: x.roll(1, 0),
        "nll": lambda x, target, weight, *_: F.nll_loss(x.log_softmax(1), target, weight=weight),
        "index_put": lambda x, target, weight, rows, ones: x.index_put((rows,), ones),
    }
    others = [target, weight, torch.tensor([3, 1, 6]), torch.ones(3, 6, dtype=torch.float64)]
    placed = [distribute_tensor(tensor, mesh, [Shard(0) if tensor is target else Replicate()]) for tensor in others]
    for name, call in calls.items():
        torch._dynamo.reset()
        one, leaf = whole.clone().requires_grad_(), distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        expected = call(one, *others)
        found = torch.compile(call, backend="aot_eager", fullgraph=name != "index_put")(leaf, *placed)
        for result in (expected, found):
            (result * result * result).sum().backward()
        if not max(_distance(found, expected), _distance(leaf.grad, one.grad)) < 1e-10:
            wrong.append(name)
    return wrong


@pytest.mark.full
def test_rules_do_without_values_in_a_trace_or_leave_it():
    assert run_ranks(4, _without_values, deadline_s=120) == [[]] * 4


def _shifted():
    """Return the placements for which a shift is wrong in a compiled region or after it."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, whole, bits, wrong = init_device_mesh("cpu", (2,)), torch.arange(-8, 8).reshape(4, 4), torch.ones(4, 4), []
    shifts = (lambda x, y: x >> 1, lambda x, y: x << 2, lambda x, y: x >> y, lambda x, y: x << y)
    for places in ((Replicate(), Replicate()), (Shard(0), Shard(0)), (Shard(0), Shard(1))):
        x, y = (
            distribute_tensor(value.long(), mesh, [place]) for value, place in zip((whole, bits), places, strict=True)
        )
        for shift in shifts:
            torch._dynamo.reset()
            calls = (shift, torch.compile(shift, backend="eager"), torch.compile(shift, backend="aot_eager"), shift)
            if any(_distance(call(x, y), shift(whole, bits.long())) for call in calls):
                wrong.append(places)
    return wrong


@pytest.mark.full
def test_a_shift_is_not_taken_for_a_write_in_place():
    assert run_ranks(2, _shifted, deadline_s=120) == [[]] * 2


def _overwritten(x):
    y = x * 1
    y[1:3] = 2.0
    return y


# A call that a rule computes from its own rank, and how its input is sharded.
OF_A_RANK = {
    "cumsum": (CALLS["cumsum"], Shard(0)),
    "rows": (_overwritten, Shard(0)),
    "loss": (lambda x: F.cross_entropy(x, torch.tensor([0, 5, 1, 2, 3, 4, 0, 5])), Shard(1)),
}


def _for_all_ranks(name):
    """Return whether one graph for all ranks refuses a rule that knows its rank, and whether more graphs are right."""
    import torch.distributed.config
    from torch.distributed.tensor.parallel import loss_parallel

    import holdfast.spmd

    holdfast.spmd.enable()
    torch.distributed.config.compile_on_one_rank = True
    call, place = OF_A_RANK[name]
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shards = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [place])
    with loss_parallel() if name == "loss" else nullcontext():
        try:
            torch.compile(call, backend="eager", fullgraph=True)(shards)
        except Exception as error:  # noqa: BLE001 - the text is compared
            said = "compile_on_one_rank" in str(error)
        else:
            said = "no error"
        found = torch.compile(call, backend="aot_eager")(shards)
    return said, _distance(found, call(whole)) < 1e-10


@pytest.mark.skipif(not AT_LEAST_2_13, reason="torch has no compile_on_one_rank before 2.13")
@pytest.mark.sliced(100)  # one of them
@pytest.mark.parametrize("name", OF_A_RANK)
def test_no_rule_is_traced_into_a_graph_that_other_ranks_run(name):
    assert run_ranks(2, _for_all_ranks, name, deadline_s=120) == [(True, True)] * 2


def _write_into_input(rows, places):
    """Return the gradients of an input whose rows a compiled region overwrote, and of the new rows."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(6.0 * rows).reshape(rows, 6)

    def write(y, value):
        y[0:1] = value
        return y * y

    found = []
    for compiled in (torch.compile(write, backend="aot_eager"), torch.compile(write, backend="eager")):
        x = distribute_tensor(whole, mesh, places).requires_grad_()
        value = distribute_tensor(torch.ones(1, 6), mesh, [Replicate()]).requires_grad_()
        compiled(x * 1, value).sum().backward()
        found.append([x.grad.full_tensor().tolist(), value.grad.full_tensor().tolist()])
    return found


@pytest.mark.full
@pytest.mark.parametrize(("rows", "places"), [(5, [Shard(0)]), (4, [Shard(0)]), (4, [Replicate()]), (4, [Shard(1)])])
def test_rows_that_a_compiled_region_overwrites_have_no_gradient(rows, places):
    kept = 2 * torch.arange(6.0 * rows).reshape(rows, 6)
    kept[0] = 0.0
    expected = [kept.tolist(), [[2.0] * 6]]
    assert run_ranks(2, _write_into_input, rows, places, deadline_s=120) == [[expected, expected]] * 2


def _whole_graph():
    """Return what a graph that must not break says of a call with an uneven shard."""
    import holdfast.spmd

    holdfast.spmd.enable()
    whole = torch.randn(5, 6, dtype=torch.float64)
    shards = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    try:
        torch.compile(lambda x: x.cumsum(-2), backend="aot_eager", fullgraph=True)(shards)
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return "no error"


def test_a_graph_that_must_not_break_says_whose_rule_and_the_way_out():
    for said in run_ranks(2, _whole_graph, deadline_s=120):
        assert "aten.cumsum.default: with holdfast.spmd a tensor of shape [5, 6]" in said
        assert "enable(exclude=['cumsum'])" in said


def _collectives():
    """For each plan, without the rules and with them: graphs, breaks, and how often each collective is called."""
    from collections import Counter

    from benchmarks.spmd_compiled import BATCH, LENGTH, PLANS, VOCABULARY, Decoder
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch.distributed.tensor.parallel import parallelize_module

    import holdfast.spmd

    found = {}
    for enabled in (False, True):
        if enabled:
            holdfast.spmd.enable()
        for name, plan in PLANS.items():
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            graphs = []

            def keep(graph, _, graphs=graphs):
                graphs.append(graph)
                return make_boxed_func(graph.forward)

            model = parallelize_module(Decoder(), init_device_mesh("cpu", (2,)), plan())
            compiled = torch.compile(model, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
            compiled(torch.randint(0, VOCABULARY, (BATCH, LENGTH))).sum().backward()
            called = Counter(str(node.target) for graph in graphs for node in graph.graph.nodes)
            sent = {target: count for target, count in called.items() if "c10d" in target}
            found[name, enabled] = len(graphs), dict(torch._dynamo.utils.counters["graph_break"]), sent
    return found


@pytest.mark.full
def test_a_compiled_tensor_parallel_decoder_has_the_collectives_of_torch_alone():
    found = run_ranks(2, _collectives, deadline_s=240)[0]
    for (name, enabled), seen in found.items():
        assert seen == found[name, not enabled], name
        assert seen[0] == 2 and not seen[1] and seen[2], "a forward and a backward graph, nothing between them"


def _batches_of_other_sizes(placements):
    """Train with a loss written by hand on batches of several sizes; return the sizes for which it is off."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []

    def loss(x, labels):
        return -x.log_softmax(-1).gather(1, labels[:, None]).mean()

    compiled = torch.compile(loss, backend="aot_eager")
    for rows in (4, 6, 8):
        whole = torch.randn(
            rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)
        ).requires_grad_()
        labels = torch.arange(rows) % 6
        x = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
        found, expected = compiled(x, distribute_tensor(labels, mesh, placements)), loss(whole, labels)
        found.backward()
        expected.backward()
        if not torch.allclose(found.full_tensor(), expected) or not torch.allclose(x.grad.full_tensor(), whole.grad):
            wrong.append(rows)
    return wrong


MEANS = {"mean": lambda x: x.mean(), "by shape": lambda x: x.sum() / x.shape[0], "max": lambda x: x.max(0).values.sum()}


def _uneven_batches(backend, dynamic):
    """Run compiled functions for sizes of which some ranks have equal shards; return those that are off."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    for name, call in MEANS.items():
        compiled = torch.compile(call, backend=backend, dynamic=dynamic)
        for rows in (4, 6, 5, 7, 8, 5):
            whole = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
            whole.requires_grad_()
            x = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
            found, expected = compiled(x), call(whole)
            found.backward()
            expected.backward()
            pairs = ((found, expected), (x.grad, whole.grad))
            if not all(torch.allclose(own.full_tensor(), plain) for own, plain in pairs):
                wrong.append((name, rows))
    return wrong


@pytest.mark.sliced(3)
@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", None), ("aot_eager", False), ("eager", False)])
def test_a_graph_is_reused_only_for_sizes_that_are_sharded_alike(backend, dynamic):
    assert run_ranks(2, _uneven_batches, backend, dynamic, deadline_s=120) == [[], []]


@pytest.mark.sliced(2)
@pytest.mark.parametrize("place", [Replicate(), Shard(0)])
def test_a_compiled_loss_takes_batches_of_other_sizes(place):
    assert run_ranks(2, _batches_of_other_sizes, [place], deadline_s=120) == [[], []]


def _dynamic_lookups():
    """Train a sharded table, compiled once for batches of any size; return the sizes for which the loss is off."""
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    import holdfast.spmd

    holdfast.spmd.enable()
    torch.manual_seed(0)
    whole = torch.nn.Embedding(8, 6, dtype=torch.float64)
    table = torch.nn.Embedding(8, 6, dtype=torch.float64)
    table.load_state_dict(whole.state_dict())
    table = parallelize_module(table, init_device_mesh("cpu", (2,)), RowwiseParallel(input_layouts=Replicate()))

    def loss(model, tokens, targets):
        return F.cross_entropy(model(tokens), targets)

    compiled, wrong = torch.compile(loss, backend="aot_eager", fullgraph=True), []
    for rows in (4, 5, 7):
        tokens, targets = torch.arange(rows) % 8, torch.arange(rows) % 6
        for tensor in (tokens, targets):
            torch._dynamo.mark_dynamic(tensor, 0)
        found, expected = compiled(table, tokens, targets), loss(whole, tokens, targets)
        for value, model in ((found, table), (expected, whole)):
            model.zero_grad()
            value.backward()
        if not torch.allclose(found, expected) or not torch.allclose(
            table.weight.grad.full_tensor(), whole.weight.grad
        ):
            wrong.append(rows)
    return wrong


@pytest.mark.full
def test_lookups_of_a_dynamic_batch_stay_in_the_graph():
    assert run_ranks(2, _dynamic_lookups, deadline_s=120) == [[], []]


def _squares(c):
    return torch.view_as_real(c * c.conj()).flatten(1)


def _conjugate_written(c):
    written = c * 1
    written.conj().mul_(2j)
    return written * 3


CONJUGATES = {
    "squares": lambda x: _squares(torch.view_as_complex(x.reshape(x.shape[0], 3, 2))),
    "gathered": lambda x: torch.view_as_real(torch.complex(x, x * 2).mH @ torch.complex(x, x + 1)),
    "rows": lambda x: torch.view_as_real(torch.complex(x, x * 2).conj()[1:3] * 1),
    "written": lambda x: torch.view_as_real(_conjugate_written(torch.complex(x, x * 2))),
}


def _conjugates(name):
    """Return the conjugates that are wrong compiled, or eager after it, each with the size and the placement."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, found = init_device_mesh("cpu", (2,)), {}
    call = CONJUGATES[name]
    for rows in (4, 5):
        whole = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for places in ([Shard(0)], [Partial()]):
            found[f"{name} {rows} {places[0]}"] = _gap(call, whole, mesh, places, "aot_eager")
    return {title: gap for title, gap in found.items() if not max(gap) < 1e-10}


@pytest.mark.full
@pytest.mark.parametrize("name", CONJUGATES)
def test_a_conjugate_stays_in_the_graph_and_is_still_a_view(name):
    if name == "squares" and is_torch_2_11():
        pytest.skip(
            "torch 2.11 leaves the graph at a conjugate, and cannot return view_as_complex of a reshape from it"
        )
    assert run_ranks(2, _conjugates, name, deadline_s=240) == [{}, {}]
