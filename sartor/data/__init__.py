"""Federations: what they hold, how they are divided, and where their data come from."""

from __future__ import annotations

from sartor.data.datasets import available, from_dataset, load
from sartor.data.federation import Federation
from sartor.data.folder import from_folder
from sartor.data.layouts import DATASETS
from sartor.data.partition import Partition, divide, parse_partition
from sartor.data.sources import from_hf, from_torch
from sartor.data.split import Ragged
from sartor.data.tables import from_dataframe, from_file

__all__ = [
    "DATASETS",
    "Federation",
    "Partition",
    "Ragged",
    "available",
    "divide",
    "from_dataframe",
    "from_dataset",
    "from_file",
    "from_folder",
    "from_hf",
    "from_torch",
    "load",
    "parse_partition",
]
