"""Faults inside of a writer process: Python imports this module at its start where the path names this folder.

HOLDFAST_FAULT is `call:text:number:action`: at the number-th call of `os.call` whose path has the
text in it, do `kill` (the writer), `rank` (the writer and its trainer), `stop` (both pause), `hang`
(the call never answers) or `error` (the call raises EIO). Where HOLDFAST_FAULT_WHEN names a file,
calls count from the moment that it is there.
"""

import os
import signal
import threading
import time


def _path_of(argument: object) -> str:
    if isinstance(argument, int):
        try:
            return os.readlink(f"/proc/self/fd/{argument}")
        except OSError:
            return ""
    return os.fspath(argument)  # type: ignore[call-overload]


def _do(action: str) -> None:
    if action == "hang":
        time.sleep(3600)
    elif action == "error":
        raise OSError(5, "Input/output error")
    elif action == "stop":
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        if action == "rank":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _inject(fault: str) -> None:
    call, text, number, action = fault.split(":")
    real = getattr(os, call)
    lock = threading.Lock()
    left = [int(number)]
    when = os.environ.get("HOLDFAST_FAULT_WHEN", "/")

    def called(*arguments: object, **options: object) -> object:
        # The last path counts: a rename is known by what it makes.
        paths = [_path_of(argument) for argument in arguments[:2] if isinstance(argument, int | str | os.PathLike)]
        if text in (paths[-1] if call == "rename" else paths[0]) and os.path.exists(when):
            with lock:
                left[0] -= 1
                now = left[0] == 0
            if now:
                _do(action)
        return real(*arguments, **options)

    setattr(os, call, called)


if os.environ.get("HOLDFAST_FAULT"):
    _inject(os.environ["HOLDFAST_FAULT"])
