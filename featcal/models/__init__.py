"""Run a model block by block, alone or next to other models."""
