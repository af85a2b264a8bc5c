"""Tests mirror src: a package has a folder of its name, a module a file of its name; exceptions have a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.house import sources

# Folders beside the mirror: what they hold.
BESIDE = {
    "attacks": "hostile files and users",
    "dist": "real ranks, against a single process",
    "docs": "README.md and docs/: their code runs, their links lead somewhere",
    "faults": "every fault, counted; a slice of it as tests",
    "fuzz": "mutated bytes into every parser",
    "golden": "checkpoints of every version of the format",
    "house": "how the code reads",
    "interop": "the real Paddle, in an environment of its own",
    "mutants": "changed code that the tests must notice",
    "objects": "a real object store",
    "power": "real disks that lose power",
    "props": "states and layouts at random, against numpy",
    "release": "the archives of a release, used in bare environments",
    "torch_tests": "torch's own tests under holdfast.spmd",
    "web/browser": "the page in a real browser, by view",
}
# Test files of an idea that several modules of their package share.
SEVERAL = {
    "adapters/program/test_architectures.py": "export and run together, on whole models",
    "capture/test_training_goes_on.py": "a capture among training steps: copy, hooks and arena together",
    "capture/test_upkeep.py": "what many captures leave behind",
    "checkpoint/test_small_files.py": "tags, policy and catalog that cannot be read",
    "cli/test_files.py": "what every command says of files that it cannot open",
    "convert/test_quantized.py": "quantized weights through a whole conversion",
    "convert/test_values.py": "values that are no tensors through a whole conversion",
    "engine/test_load_partly.py": "load: options that leave something out",
    "integrations/test_launcher.py": "the process that forks ranks for the other tests of this folder",
    "integrations/test_trl.py": "TRL's trainers through integrations/transformers",
    "mapping/compile/test_fused_sizes.py": "fused and evaluate: heads of different sizes",
    "mapping/families/test_families.py": "every family against transformers",
    "mapping/families/test_live.py": "families on live models",
    "mapping/families/test_scale.py": "families at full size",
    "mapping/syntax/test_messages.py": "every error message of the language, as printed",
    "mapping/test_aoa_config.py": "Paddle's AOA configs",
    "mapping/test_aoa_programs.py": "Paddle's AOA programs",
    "mapping/test_document.py": "docs/mapping.md",
    "mapping/test_programs.py": "random programs against numpy",
    "mapping/test_saves_and_loads.py": "mappings in saves and loads",
    "mapping/test_silent_failures.py": "what other tools get wrong silently",
    "mapping/test_stack.py": "one statement through parse, compile and reverse",
    "merging/test_beside_mergekit.py": "every method beside mergekit, the peer",
    "merging/lora/test_beside_peft.py": "merged weights beside PEFT, the peer",
    "plan/test_recipe_rank.py": "recipes between tensors of different rank, against numpy",
    "sources/paddle/test_loading.py": "load from Paddle's checkpoints",
    "train/embedding/test_beside_sentence_transformers.py": "every loss beside sentence-transformers, the peer",
    "train/embedding/evaluation/test_beside_evaluators.py": "every measure beside sentence-transformers, the peer",
    "web/test_glossary.py": "the words of the page, in its scripts and in docs/page.md",
    "writer/test_leftovers_of_before.py": "cleanup and the memory tier read notes and cards of earlier releases",
    "storage/test_storage_at.py": "the package's functions storage_at and locate",
}
# Packages whose tests are by what a user does with them.
BY_USE = {"spmd": "an operator passes through rules, dispatch and patches: its tests are by operator and by hazard"}


def find() -> Iterator[str]:
    """Yield a line for each package without tests, and each test that mirrors nothing."""
    tests, package = sources.REPOSITORY / "tests", sources.PACKAGE
    for folder in sorted(_folders(package) - _folders(tests)):
        yield f"src/holdfast/{folder} has no folder tests/{folder}"
    for folder in sorted(_folders(tests) - _folders(package) - BESIDE.keys()):
        yield f"tests/{folder} mirrors no package: name its role in tests/house/mirror.py"
    for path in sorted(tests.rglob("test_*.py")):
        place = path.relative_to(tests)
        folders = {place.parts[0], place.parent.as_posix()}
        if folders & (BESIDE.keys() | BY_USE.keys()) or place.as_posix() in SEVERAL:
            continue
        module = package / place.parent / place.stem.removeprefix("test_")
        if not module.is_dir() and not module.with_suffix(".py").exists():
            yield f"tests/{place} mirrors no module: rename it, or give its reason in tests/house/mirror.py"
    for listed in sorted(SEVERAL):
        if not (tests / listed).exists():
            yield f"tests/{listed} is gone: remove it from tests/house/mirror.py"


def _folders(top: Path) -> set[str]:
    return {path.name for path in top.iterdir() if path.is_dir() and any(path.glob("*.py"))}
