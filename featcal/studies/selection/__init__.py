"""The repair of a merge chosen without labels: candidates are fitted on three quarters of the calibration samples and
judged on the fourth, four times.

`choose.select` does it all; `candidates` says which there are, `held_out` fits them on a fold, `judge` says how often a
model gives the experts' decisions and by how much two models differ, `cells` keeps what was found.
"""
