"""Training: from a method and a federation to a result.

| module | what it holds |
|---|---|
| `fit` | `fit` and `compare`, the two calls that most users need |
| `search` | hyper-parameter search whose trials train as lanes |
| `settings` | the settings of a training, checked |
| `simulation` | all runs of one method, from round to round |
| `stopping`, `callbacks` | early stopping, and objects that follow a training |
| `readout` | progress and the result of a simulation |
| `onboarding` | clients that join after training |
"""
