"""Try an installed Holdfast as a user does: `python -I try_wheel.py GOLDEN TORCH`, in a bare environment.

GOLDEN is a checkpoint of step 42, TORCH is true or false. Imports nothing of the repository.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

CONFIG = """
[model]
family = "llama"
vocab_size = 256
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
intermediate_size = 64
[data]
kind = "synthetic"
"""


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `holdfast` of this environment."""
    script = Path(sys.executable).with_name("holdfast")
    return subprocess.run([str(script), *arguments], capture_output=True, text=True, timeout=120, check=False)


def output(*arguments: str) -> str:
    """Return what a command prints that has to succeed."""
    done = command_line(*arguments)
    assert done.returncode == 0, f"holdfast {arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def try_reading(root: Path) -> None:
    """What works without torch: the command line and `holdfast.open`."""
    import numpy as np

    import holdfast

    assert "torch" not in sys.modules
    assert Path(holdfast.__file__).is_relative_to(sys.prefix), f"not the installed wheel: {holdfast.__file__}"
    assert output("--version").split()[-1] == holdfast.__version__
    assert "holdfast ls" in output("--help")
    assert "42" in output("ls", str(root))
    assert "model" in output("show", str(root))
    output("verify", str(root), "--step", "42")
    checkpoint = holdfast.open(root / "step-000000000042")
    key = next(iter(checkpoint.keys("model")))
    assert isinstance(checkpoint.read(key), np.ndarray)
    assert checkpoint.verify().good
    assert set(holdfast.__all__) <= set(dir(holdfast))


def try_what_needs_torch(config: Path) -> None:
    """Where torch is missing, saves, training and the demo say what to install."""
    import holdfast

    calls = {
        "save": lambda: holdfast.save("saved", {"a": 1}),
        "load": lambda: holdfast.load("saved", {"a": 1}),
        "Checkpointer": lambda: holdfast.Checkpointer("run").restore({"a": 1}),
    }
    for name, call in calls.items():
        try:
            call()
        except holdfast.Unsupported as error:
            assert "pip install 'holdfast[torch]'" in str(error), error
        else:
            raise AssertionError(f"holdfast.{name} without torch")
    for arguments in (("train", str(config)), ("demo", "--out", "demo")):
        done = command_line(*arguments)
        assert done.returncode != 0 and "pip install 'holdfast[" in done.stderr, f"{arguments}: {done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr


def try_saving(folder: Path) -> None:
    """With torch: a save, a load, and a run that saves in the background and restores."""
    import torch

    import holdfast

    def make() -> dict[str, object]:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    state, other = make(), make()
    holdfast.save(folder / "once", state)
    holdfast.load(folder / "once", other)
    assert torch.equal(state["model"].weight, other["model"].weight)  # type: ignore[attr-defined]
    with holdfast.Checkpointer(folder / "run") as checkpointer:
        assert checkpointer.restore(state) is None
        checkpointer.save(1, state).result(60)
    with holdfast.Checkpointer(folder / "run") as checkpointer:
        assert checkpointer.restore(make()) == 1
    output("verify", str(folder / "run"))


def main() -> None:
    """Try everything that is expected of this environment."""
    golden, torch = Path(sys.argv[1]), json.loads(sys.argv[2])
    root, config = Path("root").resolve(), Path("run.toml")
    shutil.copytree(golden, root / "step-000000000042")
    config.write_text(CONFIG)
    try_reading(root)
    if torch:
        try_saving(Path("saved").resolve())
    else:
        try_what_needs_torch(config)


if __name__ == "__main__":
    main()
