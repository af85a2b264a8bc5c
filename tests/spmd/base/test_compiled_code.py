"""Code that was compiled before `enable()`, after `disable()`, or by an earlier start of another rank is not run."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast.spmd
from holdfast.spmd.base import compiled_code
from tests.dist.harness import run_ranks


def _across_switches():
    """A compiled function's sums: without the rules, with them, and without them again."""
    holdfast.spmd.disable()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).reshape(4, 3)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    scan = torch.compile(lambda x: x.cumsum(-2) * 2, backend="aot_eager")
    found = [scan(tensor).full_tensor()]
    holdfast.spmd.enable()
    found.append(scan(tensor).full_tensor())
    holdfast.spmd.disable()
    found.append(scan(tensor).full_tensor())
    return [torch.equal(result, whole.cumsum(-2) * 2) for result in found]


def test_a_function_that_was_compiled_before_is_compiled_again():
    # torch alone scans each shard by itself, before and after
    assert run_ranks(2, _across_switches, deadline_s=120) == [[False, True, False]] * 2


CALLS = {"tril": lambda x: x.tril() * 2, "argmax": lambda x: x.argmax(0) * 2}


def _second_start(folder):
    """Calls that differ from one device after a second compilation, which finds the first one's graphs on disk."""
    from torch._dynamo.utils import counters
    from torch._inductor import config

    config.compile_threads = 1
    config.cpp_cache_precompile_headers = False
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(16.0).reshape(4, 4) % 7 + 1
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    wrong, hits = [], 0
    for start in range(2):
        for name, call in CALLS.items():
            torch._dynamo.reset()
            counters.clear()
            found = torch.compile(call, backend="inductor")(tensor).full_tensor()
            hits += start * counters["aot_autograd"]["autograd_cache_hit"]
            wrong += [] if torch.equal(found, call(whole)) else [f"{name} at start {start}"]
        dist.barrier()
    return wrong, hits >= len(CALLS)


@pytest.mark.full
def test_a_second_start_runs_no_graph_of_another_rank(tmp_path):
    assert run_ranks(2, _second_start, str(tmp_path), deadline_s=240) == [([], True)] * 2


def _tags():
    without = torch.compiler.config.cache_key_tag
    holdfast.spmd.enable(exclude=["loss"])
    some = torch.compiler.config.cache_key_tag
    holdfast.spmd.enable()
    tag = torch.compiler.config.cache_key_tag
    texts = [pickle.loads(pickle.dumps(tag)), str(tag), f"{tag}", pickle.loads(pickle.dumps(some))]
    threads = ThreadPoolExecutor(1)
    texts.append(threads.submit(lambda: str(torch.compiler.config.cache_key_tag)).result())
    with torch.compiler.config.patch(cache_key_tag="mine"):
        texts.append(str(torch.compiler.config.cache_key_tag))
    holdfast.spmd.disable()
    with torch.compiler.config.patch(cache_key_tag="mine"):
        assert torch.compiler.config.cache_key_tag == "mine"
    assert threads.submit(lambda: torch.compiler.config.cache_key_tag).result() == ""
    return without, texts, torch.compiler.config.cache_key_tag


def test_the_key_of_a_cached_graph_has_the_rules_and_the_rank():
    (before, own, after), (_, other, _) = run_ranks(2, _tags, deadline_s=60)
    assert before == after == ""
    assert own[0] == own[1] == own[2] and "rank 0 of 2" in own[0] and "rank 1 of 2" in other[0]
    assert own[4] == own[0], "in another thread"
    assert own[5] == f"mine {own[0]}"
    assert own[3] != own[0] and own[0].replace("rank 0", "rank 1") == other[0]


def test_a_torch_without_the_private_setting_has_the_tag_in_this_thread(monkeypatch):
    monkeypatch.setattr(compiled_code, "_IS_FORCED", False)
    try:
        holdfast.spmd.enable()
        assert "holdfast.spmd" in str(torch.compiler.config.cache_key_tag)
    finally:
        holdfast.spmd.disable()
    assert torch.compiler.config.cache_key_tag == ""


def test_replaced_functions_do_not_share_dynamo_s_limit_of_recompilations():
    holdfast.spmd.enable()
    try:
        codes = {id(function.__code__) for function in (F.pad, F.instance_norm, F.multi_margin_loss)}
        assert len(codes) == 3
    finally:
        holdfast.spmd.disable()
