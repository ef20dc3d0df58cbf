"""Choose the repair of a merge without labels: fit candidates on three quarters of the calibration samples and judge
them on the fourth, four times.

`choose.select` is the entry; `candidates` lists the candidates, `held_out_samples` draws the folds, `judge` measures
the probability of the experts' decisions under a model and the difference of two models, `cells` stores the results.
"""
