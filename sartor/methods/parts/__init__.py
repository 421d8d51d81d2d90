"""What several methods share, or what is too much for the file of one.

| module | holds | used by |
|---|---|---|
| `partial` | FedAvg on some leaves, others private | fedper, fedrep, fedbabu, lg-fedavg, fedbn |
| `prototypes` | class means of a client's features | fedproto, fedgh, fedpac, fedrod, dbe |
| `proximal` | proximal solves on a batch, and steps of w | pfedme, pfedbred |
| `mixture` | networks that answer together | fedem, pfedbayes |
| `starts` | initial models that differ, hypernetworks | apple, fedem, fedproto, pfedhn, pfedla |
| `simplex` | quadratic programmes over the simplex | fedpac |
| `grouping` | groups of clients from distances or points | dichotomous |
| `bregman` | exponential families as geometries | pfedbred |
"""
