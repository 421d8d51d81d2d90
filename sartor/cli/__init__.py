"""The command line: it parses, calls the library, and prints; nothing is computed here.

::

    program.py       one command from its words to its exit code
    app.py           every command by its name
    training.py      demo, run, compare and resume; work.py calls the library
    using.py         predict and export
    advice.py, search.py, newcomers.py, reproduction.py   the larger commands, each by itself
    looking.py       the commands that do not train: listing.py, doctor.py
    network.py       keys, serve, join and status
    config.py        an experiment, checked by the schema of the settings
    completion.py    the words that a shell completes
    flags.py         a flag for every key of an experiment, and the pages of help
    settings.py      from an experiment to the arguments of the library
    show.py, interruption.py   what is printed, and Ctrl-C
"""

from sartor.cli.program import entry, main

__all__ = ["entry", "main"]
