"""The repair of a merge chosen without labels: candidates are fitted on three quarters of the calibration samples and
judged on the fourth, four times.

`choose.select` does it all; `candidates` says which there are, `held_out_samples` draws the folds, `judge` says how
probable the experts' decisions are under a model and by how much two models differ, `cells` keeps what was found.
"""
