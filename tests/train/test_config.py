"""One config file: read strictly, written whole, and its batches planned before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.train.config import RunConfig, check_run, parse_config, plan_batches, read_config

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = """
[model]
vocab_size = 32
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
"""


@pytest.mark.parametrize("name", ["dense-tiny.toml", "moe-tiny.toml"])
def test_examples_are_good_and_survive_being_written(name: str):
    config = read_config(EXAMPLES / name)
    config.layout.check(config.layout.world, config.model)
    assert plan_batches(config).global_batch == 16
    assert parse_config(config.to_toml()) == config


def test_only_the_model_must_be_given():
    assert parse_config(MODEL).train.steps == 100
    with pytest.raises(holdfast.InvalidArgument, match="is missing model"):
        parse_config("[train]\nsteps = 3\n")
    with pytest.raises(holdfast.InvalidArgument, match="model is missing vocab_size"):
        parse_config("[model]\n")


@pytest.mark.parametrize(
    ("assignment", "match"),
    [
        ("optimizer.learning_rate=1", "no setting optimizer.learning_rate"),
        ("trian.steps=3", r"no setting trian: did you mean train\?"),
        ("layout.tp=two", "layout.tp = 'two': it must be an integer"),
        ("train.dtype=float16", "float32, bfloat16"),
        ("train.device=tpu", "auto, cpu, cuda"),
        ("train.steps=0", r"train\.steps must be at least 1"),
        ("optimizer.lr=0", r"optimizer\.lr"),
        ("optimizer.beta2=1", "beta2"),
        ("optimizer.eps=-1", r"optimizer\.eps"),
        ("checkpoint.keep_last=-1", "keep_last"),
        ("schedule.kind=step", "cosine, linear, constant"),
        ("optimizer.clip=nan", r"optimizer\.clip = nan: .* finite"),
        ("optimizer.lr=inf", r"optimizer\.lr = inf: .* finite"),
        ("data.seed=-1", r"data\.seed=-1"),
        ("model.attention_dropout=1.5", "attention_dropout=1.5"),
        ("model.rms_norm_eps=-1.0", "rms_norm_eps"),
        ("model.rope_theta=0", "rope_theta"),
        ("ema.decay=2.0", r"ema\.decay"),
        ("ema.every=0", r"ema\.every"),
        ("ema.device=gpu", r"ema\.device"),
    ],
)
def test_settings_that_make_no_sense(assignment: str, match: str):
    with pytest.raises(holdfast.InvalidArgument, match=match):
        parse_config(MODEL, [assignment])


def test_no_file(tmp_path: Path):
    with pytest.raises(holdfast.NotFound, match=r"no\.toml"):
        read_config(tmp_path / "no.toml")


def _planned(*assignments: str) -> tuple[int, int, int, int]:
    batches = plan_batches(parse_config(MODEL, assignments))
    return batches.global_batch, batches.micro_batch, batches.accumulation, batches.data_parallel


def test_batches_follow_the_layout():
    assert _planned() == (1, 1, 1, 1)
    assert _planned("train.global_batch=8") == (8, 1, 8, 1)
    assert _planned("train.global_batch=8", "layout.dp_shard=2", "layout.dp_replicate=2") == (8, 1, 2, 4)
    assert _planned("train.global_batch=8", "train.accumulation=2", "layout.dp_shard=2") == (8, 2, 2, 2)
    assert _planned("train.micro_batch=3", "layout.pp=4", "layout.dp_shard=2") == (24, 3, 4, 2)


def test_a_pipeline_needs_enough_micro_batches():
    with pytest.raises(
        holdfast.InvalidArgument, match=r"4 stages needs at least 4 .* there are 2: use train\.global_batch=16"
    ):
        plan_batches(parse_config(MODEL, ["train.global_batch=8", "train.micro_batch=4", "layout.pp=4"]))


def test_an_interleaved_pipeline_goes_in_equal_rounds():
    """As torch's schedule does: of 4 ranks, 10 micro batches are two rounds of 5, and 9 are none."""
    interleaved = ["layout.pp=2", "layout.stages_per_rank=2", "layout.schedule=interleaved"]
    for count in (4, 6, 8):
        assert _planned(*interleaved, f"train.global_batch={count}")[2] == count
    with pytest.raises(holdfast.InvalidArgument, match=r"5 micro batches .* use train\.global_batch=4 or 6"):
        plan_batches(parse_config(MODEL, [*interleaved, "train.global_batch=5"]))


@pytest.mark.parametrize(
    ("assignments", "world", "match"),
    [
        (
            ["layout.tp=2", "data.sequence=7"],
            2,
            r"sequences of 7 tokens are not divisible by tp=2.*2 ranks: dp_shard=2",
        ),
        (["layout.tp=2"], 4, "needs 2 ranks .* but there are 4"),
        (["data.kind=text"], 1, r"data\.kind='text' needs a data\.path"),
        (["data.path=words.txt"], 1, r"data\.kind='synthetic' takes no data\.path"),
        (["data.sequence=4096"], 1, r"exceeds model\.max_position_embeddings=2048"),
        (["checkpoint.model_dtype=int8"], 1, "choose bfloat16 or float16"),
        (["train.evaluate_every=5"], 1, r"data\.evaluation_samples=0"),
        (["train.global_batch=3", "layout.dp_shard=2"], 2, "global_batch=3 is not a multiple"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_starts(assignments: list[str], world: int, match: str):
    with pytest.raises(holdfast.InvalidArgument, match=match):
        check_run(parse_config(MODEL, assignments), world)


def test_policies_and_occasions():
    def made(*assignments: str) -> tuple[object, object]:
        config: RunConfig = parse_config(MODEL, assignments)
        return config.checkpoint.policy(), config.checkpoint.occasion()

    policy, occasion = made("checkpoint.keep_every=10", "checkpoint.every_seconds=5")
    assert str(policy) == str(holdfast.keep.last(3) | holdfast.keep.every(10))
    assert occasion == holdfast.when.preempted() | holdfast.when.steps(100) | holdfast.when.seconds(5)
    policy, occasion = made("checkpoint.keep_last=0", "checkpoint.every_steps=0")
    assert policy is None
    assert occasion == holdfast.when.preempted()
