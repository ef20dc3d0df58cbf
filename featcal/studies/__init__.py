"""Many models of a suite measured alike: one module per study, one runner that keeps every finished row on disk.

`names` says which models, `needs` what each takes, `meter` what it costs; `rows` keeps what was measured, `runner`
measures what is missing, `summary` takes the rows of all seeds together. `paper` has the tables that the paper printed.
"""
