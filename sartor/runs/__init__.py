"""Run folders: everything about a run, on disk, readable by people and by Sartor.

::

    folder.json          format and kind of the folder
    config.json          the resolved settings
    environment.json     versions, platform, processor, device
    metrics.csv          run, round, client, point, split, accuracy, loss, count
    ledger.csv           run, round, participants, bytes, gradient evaluations; seconds
    summary.json         one object per run
    result.safetensors   the whole result, exactly
    baseline.safetensors LocalTrain on the same allocations, if it was trained
    checkpoints/         the last two, and latest.json that points at them
    models/              the final weights of every client
    report.html          the page for people
    clients.json         counts and measures of every client, for its page
    clients/             a page for every client
    experiment.json      what a command was asked for; ``sartor resume`` starts from it
    status.json          how far the server of a federation over a network is

A comparison is a folder with one run folder per method and ``comparison.json``; the folder of an
advice holds ``advice.json`` and, once it was verified, ``verification.json``. Every file is
written atomically, so kill -9 at any moment leaves a readable folder.

::

    folder.py             what all kinds of folders share, and opening any
    run_folder.py         the folders of a run and of a comparison; sartor.adviser.folder is that of
                          an advice
    checkpoints.py        the checkpoints of a run
    archive.py            a result as tensors, JSON and rows of tables
    storage.py            trees and JSON as files, written atomically
"""

from sartor.runs.folder import environment, folder_kind, open_folder, slug
from sartor.runs.run_folder import ComparisonFolder, RunFolder, save_result

__all__ = [
    "ComparisonFolder",
    "RunFolder",
    "environment",
    "folder_kind",
    "open_folder",
    "save_result",
    "slug",
]
