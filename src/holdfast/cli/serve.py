"""`holdfast serve`: a page of runs and checkpoints on this machine, live, for a browser."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
import webbrowser
from typing import TYPE_CHECKING

import click

from holdfast.cli.render import clean
from holdfast.core.errors import InvalidArgument, StorageError

if TYPE_CHECKING:
    from holdfast.web.http_server import HttpServer


@click.command("serve", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("roots", nargs=-1, required=True, metavar="ROOT [ROOT ...]")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port. [default: 0, any free one]")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--name", "names", multiple=True, metavar="NAME", help="Another name of this machine. Repeatable.")
@click.option("--token", "with_token", is_flag=True, help="Require a token on the loopback too, on shared machines.")
@click.option("--allow-changes", is_flag=True, help="Let the page tag steps and delete what gc would delete.")
@click.option("--open", "is_opened", is_flag=True, help="Open the page in a browser.")
def command(
    roots: tuple[str, ...],
    port: int,
    host: str,
    names: tuple[str, ...],
    with_token: bool,
    allow_changes: bool,
    is_opened: bool,
) -> None:
    """Serve a page about the runs and checkpoints under each ROOT, until Ctrl-C.

    ROOT is a run's root, the folder of a `holdfast train` run, a folder of runs, a checkpoint, or
    an object store's address. The page shows what was saved, how long training waited, what
    changed between two steps, whether it is intact, and the save in flight, live. It reads files
    only: training beside it is not touched, and nothing is changed without --allow-changes.

    \b
    holdfast serve runs/llama --open              look at one run
    holdfast serve runs s3://bucket/runs/llama    all runs of a folder, and one in a bucket
    holdfast serve runs --host 0.0.0.0            for other machines: the address has a token

    For a run on another machine, a tunnel is safer than --host, because nothing here is encrypted:

    \b
    ssh -L 8000:localhost:8000 machine holdfast serve runs/llama --port 8000
    """
    from holdfast.web.access_guard import AccessGuard, is_loopback, own_names
    from holdfast.web.http_server import HttpServer
    from holdfast.web.page_api import PageApi
    from holdfast.web.served_runs import ServedRoots

    loopback = is_loopback(host)
    token = secrets.token_urlsafe(24) if with_token or not loopback else None
    known = frozenset(name.lower() for name in names) | (frozenset() if loopback else own_names())
    application = PageApi(ServedRoots(list(roots)), allow_changes=allow_changes)
    guard = AccessGuard(on_loopback=loopback, token=token, names=known)

    def started(actual: int) -> None:
        address = page_address(host, actual, token)
        click.echo(f"holdfast: serving {clean(', '.join(roots))} on {address}")
        click.echo("holdfast: Ctrl-C ends it", err=True)
        sys.stdout.flush()
        if is_opened:
            webbrowser.open(address)

    async def serve() -> None:
        server = HttpServer(application, guard)
        _end_on_signals(server)
        await server.run(host, port, started)

    logging.getLogger("asyncio").setLevel(logging.ERROR)  # clients that go away are no news
    try:
        asyncio.run(serve())
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise InvalidArgument(
            f"cannot listen on {host} port {port}: {error.strerror or error}; "
            "choose another --port, or 0 for any free one"
        ) from None
    finally:
        application.jobs.cancel_all()


def _end_on_signals(server: HttpServer) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)


def page_address(host: str, port: int, token: str | None) -> str:
    """Return the address of the page for a browser."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (of all addresses, the nearest)
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
