"""CPU execution: traced steps, compiled layers, and the choice between them.

| module | what it holds |
|---|---|
| `traces` | steps as recorded graphs without Python between the operations |
| `thinned` | graphs with fewer operations |
| `tuning` | how many lanes a block has |
| `compiler`, `native` | C++ layers, compiled where a compiler is found |
"""
