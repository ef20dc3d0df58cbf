"""Many models of a suite measured alike: one module per study, one runner that keeps every finished row on disk.

`method_lists` says which models, `requirements` what each takes, `cost` what it costs; `store` keeps what was
measured, `runner` measures what is missing, `summary` takes the rows of all seeds together. `paper` has the tables that
the paper printed.
"""
