"""Federations: what they hold, how they are divided, and where their data come from."""

from __future__ import annotations

from sartor.data.datasets import available, load
from sartor.data.examination import Examination, examine
from sartor.data.federation import Federation
from sartor.data.layouts import DATASETS
from sartor.data.partition import Partition, divide, parse_partition
from sartor.data.split import Ragged

from_arrays = Federation.from_arrays
from_dataframe = Federation.from_dataframe
from_dataset = Federation.from_dataset
from_file = Federation.from_file
from_folder = Federation.from_folder
from_hf = Federation.from_hf
from_torch = Federation.from_torch

__all__ = [
    "DATASETS",
    "Examination",
    "Federation",
    "Partition",
    "Ragged",
    "available",
    "divide",
    "examine",
    "from_arrays",
    "from_dataframe",
    "from_dataset",
    "from_file",
    "from_folder",
    "from_hf",
    "from_torch",
    "load",
    "parse_partition",
]
