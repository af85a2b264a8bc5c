"""torch's optimizers under Paddle's names: a step becomes the powers of its own betas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.errors import Unsupported
from holdfast.sources import open_stored
from holdfast.sources.paddle.optimizer_names import as_torch
from holdfast.sources.paddle.to_paddle import as_paddle


def saved(folder: Path, **options: object) -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    groups = [
        {"params": model[0].parameters(), "betas": (0.9, 0.95)},
        {"params": model[1].parameters(), "betas": (0.8, 0.999)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, **options)  # type: ignore[arg-type]
    for _ in range(5):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    holdfast.save(folder, {"model": model, "optimizer": optimizer}, step=5)
    return {"model": model}


def test_steps_become_powers_of_each_groups_betas(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    before = open_stored(tmp_path / "c")
    seen = as_paddle(before)
    for key, betas in (("0.weight", (0.9, 0.95)), ("1.bias", (0.8, 0.999))):
        assert np.array_equal(seen.read(f"{key}/moment1_0"), before.read(f"{key}/exp_avg"))
        for number, beta in enumerate(betas, 1):
            expected = np.multiply.accumulate(np.full(6, beta, np.float32))[-1:]
            assert np.array_equal(seen.read(f"{key}/beta{number}_pow_acc_0"), expected)
    assert not any(key.endswith("/step") for key in seen.keys("optimizer"))


def test_there_and_back_the_steps_are_the_same(tmp_path: Path) -> None:
    saved(tmp_path / "c", amsgrad=True)
    before = open_stored(tmp_path / "c")
    back = as_torch(as_paddle(before))
    assert set(back.keys("optimizer")) == set(before.keys("optimizer"))
    for key in before.keys("optimizer"):
        assert back.read(key, "optimizer").tobytes() == before.read(key, "optimizer").tobytes(), key


def test_a_step_that_is_no_count_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for own in optimizer.state.values():
        own["step"].fill_(1.5)
    holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    with pytest.raises(Unsupported, match=r"weight is 1\.5|bias is 1\.5"):
        as_paddle(open_stored(tmp_path / "c"))


def test_a_checkpoint_without_an_optimizer_stays_as_it_is(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": torch.nn.Linear(2, 2)})
    checkpoint = open_stored(tmp_path / "c")
    assert as_paddle(checkpoint) is checkpoint
