"""The options of a calibration chosen without labels: candidates are fitted on most of the calibration samples and
judged on those that were held out.

`choose.select` does it all; `held_out` fits and judges one candidate, `candidates` says which there are, `study` keeps
them in a file.
"""
