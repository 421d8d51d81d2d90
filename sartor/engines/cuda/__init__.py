"""GPU execution: CUDA graphs of whole steps, and Triton kernels for lanes.

| module | what it holds |
|---|---|
| `graphs` | the engine: one captured graph per phase and lane width |
| `recording` | server functions and evaluations as graphs |
| `conv_*`, `triton_conv`, `few_kernels` | convolutions of many small networks |
| `*_kernels` | dense layers, leaves of a tree, random draws, recurrent layers |
"""
