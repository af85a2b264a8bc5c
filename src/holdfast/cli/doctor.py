"""`holdfast doctor`: what is fine on this machine and at a root, what to change before a run, and the commands."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from holdfast.cli.render import clean, count, print_json, with_deadline
from holdfast.core import limits
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.doctor.diagnosis import Diagnosis, Verdict

_MARKS = {Verdict.OK: "ok    ", Verdict.NOTE: "note  ", Verdict.CHANGE: "CHANGE"}


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("root", required=False)
@click.option("--state", metavar="SIZE", help="The size of the state of a save, such as 80GB. [default: newest step's]")
@click.option("--hosts", type=click.IntRange(1), default=1, show_default=True, help="Hosts that share --state.")
@click.option("--gpu", is_flag=True, help="Check for a run with GPUs, even if this machine has none.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(root: str | None, state: str | None, hosts: int, gpu: bool, as_json: bool) -> None:
    """Check this machine, and the file system of ROOT: what is fine, what to change, and how.

    \b
    holdfast doctor                                 torch, GPUs, shared memory, page-locking, clock
    holdfast doctor runs/llama                      also the file system of the run
    holdfast doctor /data/new --state 640GB --hosts 8 --gpu

    ROOT may be a folder that does not exist yet. fsync, renames, locks and O_DIRECT are tried in
    a temporary folder under ROOT. The size of a save is known from the newest step, or given
    with --state. Run it where the training will run: in the container, and as its user.

    Exit code 0: nothing must be changed. 1: something must. 2: usage error.
    """
    from holdfast.doctor.examination import examine
    from holdfast.doctor.run_needs import RunNeeds
    from holdfast.storage import is_address, is_checkpoint, shared_storage_at

    state_bytes = None if state is None else limits.parse_bytes(state)
    if state is None and hosts != 1:
        raise InvalidArgument("--hosts divides --state: give both")
    storage = None if root is None else shared_storage_at(with_deadline(root))
    if storage is not None and (is_address(str(root)) or os.path.isdir(storage.name)) and is_checkpoint(storage):
        raise NotFound(f"{root} is a checkpoint; give the root that contains it")
    findings = examine(storage, RunNeeds.find(storage, state_bytes, hosts), for_gpus=gpu)
    changes = [finding for finding in findings if finding.verdict is Verdict.CHANGE]
    if as_json:
        print_json([asdict(finding) | {"verdict": finding.verdict.value} for finding in findings])
    else:
        for finding in findings:
            _print(finding)
        click.echo(f"\n{count(len(changes), 'thing')} to change" if changes else "\nnothing to change")
    raise click.exceptions.Exit(1 if changes else 0)


def _print(finding: Diagnosis) -> None:
    click.echo(clean(f"{_MARKS[finding.verdict]}  {finding.check}: {finding.text}"))
    if finding.remedy:
        click.echo(clean(f"          {finding.remedy}{':' if finding.commands else ''}"))
    for line in finding.commands:
        click.echo(clean(f"            {line}"))
