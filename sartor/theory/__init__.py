"""The theory as pure functions of numbers or of client data; ``docs/theory.md`` has the statements.

::

    Yu et al., "The Effect of Personalization in FedProx"
      statistical.py      how near the minimisers come to the true models
      coupling.py         rules for the pull λ
      proximal.py         how fast FedProx and L2GD get there
      lemmas.py           what holds for every solved instance, as two sides
      tables.py           its tables of rates and costs
    Chen et al., "Minimax Estimation for Personalized Federated Learning"
      excess_risk.py      LocalTrain, FedAvg, and what nobody can beat
      two_stage_risk.py   how low two-stage FedProx brings the risk, and with which λ
      two_stage.py        how long it must run for that
      stability.py        how far one record moves a model
    Sun et al., "FedAPA"
      adaptive_mixing.py  how far one round lowers a loss
    from data (ours, but for the constants)
      linear_models.py    convex models, as functions of many clients' samples
      exact_fits.py       their minimisers: alone, together, and coupled by λ
      constants.py        L, μ, ρ and their like, from samples
      noise.py            the chance error of a fit
      calibration.py      the same to the next order, by drawn labels; firth.py fits these
      heterogeneity.py    R from the fits
      sampling_error.py   how well R is known
      random_effects.py   the expected error at every λ
    quantities.py         what the bounds share
"""
