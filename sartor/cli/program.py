"""One command, from its words to its exit code; and the program itself."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from sartor.cli.interruption import Interrupted, is_asked, watched
from sartor.core.errors import PFLError, ProcessError

BUG, FAULT, INTERRUPTED = 1, 2, 130
SHARDED = {"run", "compare", "demo", "resume", "reproduce"}
"""Commands whose lanes the processes of torchrun share; of others only the first runs them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 2 a fault of the input (one clear message, no traceback), 130 an interruption by
    Ctrl-C, and 1 a bug of ours. ``--debug``, anywhere on the line, shows the traceback as well.

    Args:
        argv: the words after the program's name; those of this process if None.
    """
    from sartor.engines.cpu.acceleration import accelerate
    from sartor.engines.shard import processes

    accelerate()  # the process is the command's own
    words = list(sys.argv[1:] if argv is None else argv)
    if processes.place()[1] > 1 and not SHARDED.intersection(words[:1]):
        if not processes.is_first():
            return 0
        processes.stay_alone()  # there is nothing to share
    try:
        if processes.is_first():
            code, message, error = _run(words)
        else:  # all processes do the same; one prints
            with open(os.devnull, "w") as no, redirect_stdout(no), redirect_stderr(no):
                code, message, error = _run(words)
        if error is not None and processes.should_report():
            from sartor.cli import show

            rank, size = processes.place()
            show.error(f"(process {rank} of {size}) {message}" if rank else message)
        if isinstance(error, ProcessError):
            sys.stderr.flush()
            os._exit(code)  # a group that lost a member may not end by itself
    finally:
        processes.leave()
    return code


def _run(words: list[str]) -> tuple[int, str, BaseException | None]:
    """Run one command: its exit code, and, if it failed, the message and the error."""
    from sartor.cli import show
    from sartor.cli.app import app

    debug = "--debug" in words
    with warnings.catch_warnings(), watched():
        warnings.showwarning = show.warning
        try:
            app(args=[word for word in words if word != "--debug"], prog_name="sartor")
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
            return code, "", None
        except Interrupted as stop:
            if debug:
                traceback.print_exc()
            show.note(str(stop))
            return INTERRUPTED, "", None
        except KeyboardInterrupt:
            return INTERRUPTED, "", None
        except Exception as error:
            if debug:
                traceback.print_exc()
            if is_asked():
                return INTERRUPTED, "", None
            if isinstance(error, PFLError):
                return FAULT, str(error), error
            hint = "This is a bug of Sartor" + ("." if debug else "; --debug shows where.")
            return BUG, f"{type(error).__name__}: {error}\n{hint}", error
    return 0, "", None


def entry() -> None:
    """Run as a program: :func:`main` with the words of this process, then exit."""
    code = main()
    network = "nvflare" in sys.modules
    if network or code == INTERRUPTED:
        # Everything is closed and written. Threads of the network library that are still about
        # may abort an orderly end of the interpreter, and a KeyboardInterrupt that passed through
        # an exec() makes it die by the signal instead of returning the code.
        if not network:
            gc.collect()
            atexit._run_exitfuncs()  # temporary folders are removed
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
