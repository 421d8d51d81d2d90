"""The core: the method record and the pure functions that it stands on.

| module | what it holds |
|---|---|
| `method` | the record of a method, its small values, and helpers for `aggregate` |
| `task` | a network and its loss as pure functions |
| `local` | local training: `Local` and `descend` |
| `schedule` | learning rates from round to round |
| `hyper` | hyper-parameters that can be swept |
| `tree` | arithmetic on nested dicts of tensors |
| `mixing` | tables over clients and matrices that mix them |
| `rng` | random numbers by key |
| `cohort` | which clients participate in a round |
| `wire` | what travels: bytes, sparse messages, private leaves |
| `layers` | dropout and BatchNorm in a form that `vmap` can map |
| `loops`, `attention` | recurrent layers and attention in such a form |
| `torch_private` | the only place for private names of PyTorch |
| `errors` | the tree of exceptions |

It imports torch, numpy and itself.
"""
