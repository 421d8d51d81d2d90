"""The command line: it parses, calls the library, and prints; nothing is computed here."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence

from sartor.errors import PFLError

BUG, FAULT, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 2 a fault of the input (one clear message, no traceback), 130 an interruption by
    Ctrl-C, and 1 a bug of ours. ``--debug``, anywhere on the line, shows the traceback as well.

    Args:
        argv: the words after the program's name; those of this process if None.
    """
    from sartor.cli import show
    from sartor.cli.app import app
    from sartor.cli.work import Interrupted

    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    with warnings.catch_warnings():
        warnings.showwarning = show.warning
        try:
            app(args=[word for word in words if word != "--debug"], prog_name="sartor")
        except SystemExit as exit:
            return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        except Interrupted as stop:
            show.note(str(stop))
            return INTERRUPTED
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception as error:
            if debug:
                traceback.print_exc()
            if isinstance(error, PFLError):
                show.error(str(error))
                return FAULT
            hint = "This is a bug of Sartor" + ("." if debug else "; --debug shows where.")
            show.error(f"{type(error).__name__}: {error}\n{hint}")
            return BUG
    return 0


def entry() -> None:
    """Run as a program: :func:`main` with the words of this process, then exit."""
    sys.exit(main())
