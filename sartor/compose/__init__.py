"""Methods made of methods: every function takes records and returns a record.

| module | what it makes of a method |
|---|---|
| `fine_tuning` | each client trains its model further, on a copy, before it is used |
| `groups` | the method inside every group of clients, as if the others did not exist |
| `parallel` | several methods at once on the same clients, each as if it were alone |
| `choice` | of several methods, each client or all together use the best by held-out samples |
| `harm` | that choice among training alone, FedAvg and the method: do no harm |
| `stacking` | several methods at their own rates, their predictions mixed, client by client |
| `robust` | the method with an average that a few bad uploads cannot carry away |

None knows what the methods do. They are options of every method (`sartor.methods.build`).
"""

from __future__ import annotations

from sartor.compose.fine_tuning import fine_tuned
from sartor.compose.groups import within_groups

__all__ = ["fine_tuned", "within_groups"]
