"""The main job in one go: train under FSDP2 x TP, resume under FSDP2 on other ranks, open with transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

SAVE_AT, UNTIL = 160, 180
OUT = Path("out/demo")


def run(ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    subprocess.run([*command, "-m", "demo.train", str(OUT), *arguments], check=True, env=environment, timeout=300)


def main() -> None:
    started = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    print(f"1. Train on 4 ranks, FSDP2 x tensor parallel 2 x 2; save at step {SAVE_AT} and go on, to compare later")
    run(4, "--mesh", "2x2", "--save-at", str(SAVE_AT), "--until", str(UNTIL))
    print("\n2. Stop. Resume on 3 ranks, FSDP2 alone")
    run(3, "--mesh", "3", "--until", str(UNTIL), "--again", "again")
    print("\n3. Open the checkpoint with transformers, as it is")
    checks = [*losses_continue(), *transformers_opens(), *bytes_are_the_same(), *bytes_are_good()]
    print(f"\nProven ({time.monotonic() - started:.0f} s):")
    for good, text in checks:
        print(f"  {'ok    ' if good else 'FAILED'} {text}")
    sys.exit(0 if all(good for good, _ in checks) else 1)


def losses_continue() -> list[tuple[bool, str]]:
    whole = json.loads((OUT / "losses-2x2.json").read_text())
    resumed = json.loads((OUT / "losses-3.json").read_text())
    steps = range(SAVE_AT + 1, UNTIL + 1)
    gap = max(abs(whole[str(step)] - resumed[str(step)]) for step in steps)
    learned = whole["1"] - whole[str(SAVE_AT)]
    return [
        (sorted(resumed, key=int) == [str(step) for step in steps], f"the second run began at step {SAVE_AT + 1}"),
        (
            gap < 1e-3 < learned,
            f"its loss continues: at most {gap:.1e} from the run that never stopped, over {len(steps)} steps",
        ),
    ]


def transformers_opens() -> list[tuple[bool, str]]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from demo.text import TEXT

    transformers.utils.logging.disable_progress_bar()
    folder = checkpoint()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    prompt = TEXT[:24]
    tokens = torch.tensor([list(prompt.encode())])
    output = model.generate(tokens, max_new_tokens=56, do_sample=False, pad_token_id=0)
    text = bytes(output[0].tolist()).decode(errors="replace")
    print(f"  {prompt!r} ... {text[len(prompt) :]!r}")
    odd = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    alike = sum(a == b for a, b in zip(text[len(prompt) :], TEXT[len(prompt) :], strict=False))
    return [
        (not odd, f"transformers opened {folder} with no missing or unexpected key"),
        (alike > 20, f"and it wrote {alike} of 56 characters as it was taught"),
    ]


def bytes_are_the_same() -> list[tuple[bool, str]]:
    names = sorted(path.name for path in checkpoint().iterdir() if "safetensors" in path.name)
    same = all((checkpoint() / name).read_bytes() == (OUT / "again" / name).read_bytes() for name in names)
    return [(same and len(names) > 1, f"{len(names)} files saved by 3 ranks are byte for byte those of 4 ranks")]


def bytes_are_good() -> list[tuple[bool, str]]:
    import holdfast

    report = holdfast.open(checkpoint()).verify()
    return [(report.good, f"every digest is right: {report.bytes} bytes in {report.files} files")]


def checkpoint() -> Path:
    return OUT / "run" / f"step-{SAVE_AT:012d}"


if __name__ == "__main__":
    main()
