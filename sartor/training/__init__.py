"""Training: from a method and a federation to a result.

| module | what it holds |
|---|---|
| `fit`, `compare` | train one method; train several on equal footing |
| `search` | hyper-parameter search whose trials train as lanes |
| `schema` | every setting, declared once: names, defaults, checks, help |
| `settings` | the settings of one call, and what follows from them |
| `simulation`, `driver` | all runs of one method, from round to round; the loop over rounds |
| `stopping`, `callbacks` | early stopping, and objects that follow a training |
| `progress` | progress bars |
| `onboarding` | clients that join after training |
"""
