"""The optimizer does what the config says, also after a restore that says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.train.loop import Trainer
from tests.dist.resume_cases import config


def test_settings_that_were_changed_between_two_starts_are_taken(tmp_path: Path):
    Trainer(config(tmp_path, {}, train__steps=1)).run()
    changed: dict[str, Any] = {"optimizer__beta1": 0.5, "optimizer__eps": 1e-3, "optimizer__weight_decay": 0.3}
    trainer = Trainer(config(tmp_path, {}, train__steps=2, **changed))
    assert trainer.run().resumed_from == 1
    matrices, vectors = trainer.optimizer.param_groups
    assert (matrices["betas"], matrices["eps"], matrices["weight_decay"]) == ((0.5, 0.95), 1e-3, 0.3)
    assert (vectors["betas"], vectors["weight_decay"]) == ((0.5, 0.95), 0.0)
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {2.0}, "its state was restored"
