import shutil

import pytest
import torch

import holdfast


def state(epoch):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    odd = {
        "nested.values": torch.tensor([1.0, float("nan"), -3.0, float("inf")]),
        "wave": torch.tensor([3 + 4j, 0j], dtype=torch.complex128),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.zeros(0, 5),
        "right\u202eleft": torch.arange(3),
    }
    return {"model": model, "optimizer": optimizer, "odd": odd, "note": {"epoch": epoch}}


@pytest.fixture(scope="session")
def original_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli") / "run"
    with holdfast.Checkpointer(root) as checkpointer:
        for step in (2, 10, 100):
            checkpointer.save(step, state(epoch=step)).result()
    return root


@pytest.fixture
def run(original_run, tmp_path):
    """A root with steps 2, 10 and 100, to be damaged at will."""
    return shutil.copytree(original_run, tmp_path / "run")


@pytest.fixture
def step(run):
    return run / "step-000000000100"
