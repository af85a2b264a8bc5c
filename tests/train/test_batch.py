"""Batch sizes follow from each other exactly, as in the published formulas of TRL and verl."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.train.batch import BatchSizes, derive_batches


def test_any_one_of_the_four_may_be_left_out():
    whole = {"global_batch": 48, "micro_batch": 2, "accumulation": 6, "data_parallel": 4}
    expected = BatchSizes(48, 48, 1, 1, 48, 2, 6, 4, 1)
    assert derive_batches(**whole) == expected
    for name in whole:
        assert derive_batches(**{key: size for key, size in whole.items() if key != name}) == expected


def test_sizes_of_one_rank():
    batches = derive_batches(global_batch=48, micro_batch=2, data_parallel=4)
    assert (batches.rank_batch, batches.rank_mini_batch, batches.updates) == (12, 12, 1)


# TRL, trl/trainer/ppo_trainer.py ("calculate various batch sizes"): local_batch_size = per_device_train_batch_size
# * gradient_accumulation_steps * num_mini_batches; batch_size = local_batch_size * world_size; mini_batch_size =
# batch_size / num_mini_batches; local_mini_batch_size = local_batch_size / num_mini_batches; and num_ppo_epochs
# passes over them.
@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("mini_batches", [1, 2, 5])
@pytest.mark.parametrize("world", [1, 8])
@pytest.mark.parametrize("epochs", [1, 4])
def test_trl_ppo(micro: int, accumulation: int, mini_batches: int, world: int, epochs: int):
    batches = derive_batches(
        micro_batch=micro,
        accumulation=accumulation,
        mini_batches=mini_batches,
        data_parallel=world,
        update_epochs=epochs,
    )
    local_batch_size = micro * accumulation * mini_batches
    batch_size = local_batch_size * world
    assert batches.global_batch == batch_size
    assert batches.rank_batch == local_batch_size
    assert batches.mini_batch == batch_size // mini_batches
    assert batches.rank_mini_batch == local_batch_size // mini_batches
    assert batches.prompts == batch_size
    assert batches.updates == mini_batches * epochs


# TRL, trl/trainer/grpo_config.py (__post_init__): generation_batch_size = per_device_train_batch_size * world
# * steps_per_generation, a multiple of num_generations; one optimizer step takes per_device_train_batch_size
# * gradient_accumulation_steps * world of them; num_iterations passes.
@pytest.mark.parametrize(
    ("micro", "accumulation", "world", "steps_per_generation", "num_generations", "iterations"),
    [(8, 1, 1, 1, 8, 1), (4, 4, 8, 4, 8, 1), (4, 2, 8, 8, 16, 2), (2, 3, 4, 12, 8, 3), (1, 16, 2, 16, 4, 1)],
)
def test_trl_grpo(
    micro: int, accumulation: int, world: int, steps_per_generation: int, num_generations: int, iterations: int
):
    generation_batch_size = micro * world * steps_per_generation
    batches = derive_batches(
        global_batch=generation_batch_size,
        micro_batch=micro,
        accumulation=accumulation,
        data_parallel=world,
        rollouts_per_prompt=num_generations,
        update_epochs=iterations,
    )
    assert batches.prompts == generation_batch_size // num_generations
    assert batches.mini_batches == steps_per_generation // accumulation
    assert batches.updates == steps_per_generation // accumulation * iterations


def test_trl_grpo_refuses_part_of_a_group():
    # grpo_config.py: generation_batch_size must be divisible by num_generations.
    with pytest.raises(holdfast.InvalidArgument) as caught:
        derive_batches(global_batch=20, rollouts_per_prompt=8, micro_batch=1, data_parallel=4, accumulation=5)
    assert "global_batch=20" in str(caught.value)
    assert "rollouts_per_prompt=8" in str(caught.value)
    # One optimizer step takes 20: what is advised must fit that too.
    assert "use global_batch=40, or rollouts_per_prompt=5 or rollouts_per_prompt=10" in str(caught.value)


# verl, verl/workers/fsdp_workers.py ("normalize config"): ppo_mini_batch_size *= rollout.n, then
# //= device_mesh.size() // ulysses_sequence_parallel_size; a multiple of ppo_micro_batch_size_per_gpu, and
# ppo_mini_batch_size // ppo_micro_batch_size_per_gpu forward passes before a step
# (verl/workers/actor/dp_actor.py, gradient_accumulation). train_batch_size and ppo_mini_batch_size count prompts.
@pytest.mark.parametrize(
    ("train_batch_size", "ppo_mini_batch_size", "n", "gpus", "ulysses", "micro", "epochs"),
    [
        (1024, 256, 1, 8, 1, 8, 1),
        (1024, 256, 5, 8, 1, 40, 1),
        (512, 128, 8, 16, 2, 4, 1),
        (64, 64, 16, 32, 4, 2, 2),
        (768, 192, 4, 6, 1, 16, 3),
    ],
)
def test_verl(
    train_batch_size: int, ppo_mini_batch_size: int, n: int, gpus: int, ulysses: int, micro: int, epochs: int
):
    data_parallel = gpus // ulysses
    normalized = ppo_mini_batch_size * n // data_parallel
    batches = derive_batches(
        prompts=train_batch_size,
        rollouts_per_prompt=n,
        mini_batch=ppo_mini_batch_size * n,
        micro_batch=micro,
        data_parallel=data_parallel,
        update_epochs=epochs,
    )
    assert batches.global_batch == train_batch_size * n
    assert batches.rank_mini_batch == normalized
    assert batches.accumulation == normalized // micro
    assert batches.mini_batches == train_batch_size // ppo_mini_batch_size
    assert batches.updates == train_batch_size // ppo_mini_batch_size * epochs


def test_what_verl_would_round_down_is_refused():
    # 256 * 1 // 512 is 0 there, and 100 * 1 // 8 is 12: four samples of each step would be lost.
    with pytest.raises(holdfast.InvalidArgument) as caught:
        derive_batches(prompts=200, mini_batch=100, micro_batch=1, data_parallel=8)
    text = str(caught.value)
    assert "mini_batch=100 is not a multiple of micro_batch x data_parallel = 1 x 8 = 8" in text
    assert "use mini_batch=40 or mini_batch=200" in text, "multiples of 8 of which 200 samples are whole mini batches"
    assert "data_parallel=5 or data_parallel=10" in text


def test_less_than_one_of_each_names_only_what_is_possible():
    with pytest.raises(holdfast.InvalidArgument, match=r"use global_batch=8, or data_parallel=3$"):
        derive_batches(global_batch=3, micro_batch=1, data_parallel=8)


def test_all_given_and_wrong_names_both_numbers_and_every_way_out():
    with pytest.raises(holdfast.InvalidArgument) as caught:
        derive_batches(global_batch=32, micro_batch=2, accumulation=3, data_parallel=4)
    text = str(caught.value)
    assert "global_batch=32 is not micro_batch x accumulation x data_parallel = 2 x 3 x 4 = 24" in text
    assert "use global_batch=24, or accumulation=4, or omit one of them" in text


def test_supervised_training_has_one_mini_batch():
    # 48 = 2 x (2 x 3 x 4) would be two optimizer steps; a loop that did not ask for them must not get them.
    with pytest.raises(holdfast.InvalidArgument, match="global_batch=48 is not"):
        derive_batches(global_batch=48, micro_batch=2, accumulation=3, data_parallel=4)
    with pytest.raises(holdfast.InvalidArgument, match=r"^global_batch=10 is not a multiple of"):
        derive_batches(global_batch=10, micro_batch=1, data_parallel=4)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4"])
def test_only_whole_numbers(size: Any):
    with pytest.raises(holdfast.InvalidArgument, match="micro_batch="):
        derive_batches(global_batch=8, micro_batch=size, data_parallel=1)


def test_too_few_sizes_name_what_is_open():
    with pytest.raises(holdfast.InvalidArgument, match=r"does not determine all batch sizes.*accumulation"):
        derive_batches(global_batch=8)


def test_every_answer_satisfies_the_products_and_nothing_is_rounded():
    for total, micro, world in itertools.product(range(1, 17), range(1, 5), range(1, 5)):
        fits = total % (micro * world) == 0
        try:
            batches = derive_batches(global_batch=total, micro_batch=micro, data_parallel=world)
        except holdfast.InvalidArgument as error:
            assert not fits
            low = total // (micro * world) * micro * world
            assert f"={low + micro * world}" in str(error)
            assert low == 0 or f"={low} " in str(error)
        else:
            assert fits
            assert batches.micro_batch * batches.accumulation * batches.data_parallel == total


_NAMES = ("global_batch", "micro_batch", "accumulation", "data_parallel", "prompts", "rollouts_per_prompt")
_SIZES = st.dictionaries(st.sampled_from((*_NAMES, "mini_batch", "mini_batches")), st.integers(1, 60), min_size=2)


@given(_SIZES)
def test_whatever_is_given_holds_and_whatever_is_advised_can_be(sizes: dict[str, int]):
    try:
        batches = derive_batches(**sizes)
    except holdfast.InvalidArgument as error:
        assert any(name in str(error) for name in sizes), "names what was given"
        for name, size in re.findall(r"(\w+)=(\d+)", str(error).partition(": take ")[2]):
            try:
                assert getattr(derive_batches(**{**sizes, name: int(size)}), name) == int(size)
            except holdfast.InvalidArgument as still:
                assert "does not determine all batch sizes" in str(still)
    else:
        assert {name: getattr(batches, name) for name in sizes} == sizes
        assert batches.global_batch == batches.prompts * batches.rollouts_per_prompt
        assert batches.global_batch == batches.mini_batches * batches.mini_batch
        assert batches.mini_batch == batches.micro_batch * batches.accumulation * batches.data_parallel
