"""The command line: it parses, calls the library, and prints; nothing is computed here.

::

    program.py       one command from its words to its exit code
    app.py           every command by its name
    training.py      the commands that train; work.py does it, outcome.py prints what came out
    looking.py       the commands that only look: listing.py, doctor.py
    network.py       keys, serve, join and status
    advice.py, search.py, reproduction.py   the larger commands, each by itself
    flags.py         a flag for every key of an experiment; help_pages.py shows the everyday ones
    settings.py      from an experiment to the arguments of the library
    show.py, progress.py, interruption.py   what a person sees, meanwhile, and Ctrl-C
"""

from sartor.cli.program import entry, main

__all__ = ["entry", "main"]
