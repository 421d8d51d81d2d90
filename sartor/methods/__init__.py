"""The methods: one file for each, in which its paper can be read line by line.

::

    catalogue.py  the list: an explicit dict, name -> entry, and what an entry is
    options.py    the options of a method, read off its signature, and those of every method
    making.py     from a name and options to a record
    parts/        what several methods share, or what is too much for the file of one
"""

from sartor.methods.catalogue import KNOWN, METHODS, PAPERS, Factory, MethodEntry, expand, find
from sartor.methods.making import build
from sartor.methods.options import COMMON, static_options

__all__ = [
    "COMMON",
    "KNOWN",
    "METHODS",
    "PAPERS",
    "Factory",
    "MethodEntry",
    "build",
    "expand",
    "find",
    "static_options",
]
