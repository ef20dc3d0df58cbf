"""Run a model block by block, on its own or beside others."""
