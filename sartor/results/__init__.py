"""Results: what a training measured and spent, and what a user reads from it.

| module | what it holds |
|---|---|
| `result` | `Result`: scores, costs, models |
| `comparison` | `Comparison`: several results on the same allocations |
| `scores`, `log` | scores and costs as arrays, and how a simulation collects them |
| `metrics`, `measures`, `headline` | metrics, their intervals, and the headline metric of a task |
| `tables`, `client_tables`, `summaries`, `readings` | tables, and what they are made of |
| `costs`, `evenness` | cost to a target accuracy, and how even the clients' scores are |
| `serving` | predictions |
| `exporting`, `onnx_program`, `model_card` | models as files and folders for others |
| `joined` | the parts of a sweep over static options as one result |
"""
