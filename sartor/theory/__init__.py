"""State the theory as pure functions of numbers or client data; see ``docs/theory.md``.

::

    Yu et al., "The Effect of Personalization in FedProx"
      statistical.py      how close the minimisers are to the true models
      coupling.py         rules for the pull λ
      proximal.py         how fast FedProx and L2GD converge
      lemmas.py           inequalities that hold for every solved instance
      tables.py           its tables of rates and costs
    Chen et al., "Minimax Estimation for Personalized Federated Learning"
      excess_risk.py      LocalTrain, FedAvg, and the lower bounds for any method
      two_stage_risk.py   the risk of two-stage FedProx, and its choice of λ
      two_stage.py        how long it must run for that risk
      stability.py        how far one sample moves a model
    Sun et al., "FedAPA"
      adaptive_mixing.py  how much one round lowers a loss
    from data (our own methods, except for the constants)
      linear_models.py    convex models, as functions of many clients' samples
      exact_fits.py       their minimisers: per client, pooled, and coupled by λ
      constants.py        L, μ, ρ and similar constants, from samples
      noise.py            the sampling error of a fit
      calibration.py      the same to the next order, by simulated labels; firth.py fits these
      heterogeneity.py    R from the fits
      sampling_error.py   how precisely R is known
      random_effects.py   the expected error at every λ
    quantities.py         what the bounds have in common
"""
