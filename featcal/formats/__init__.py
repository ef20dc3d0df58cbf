"""Read and write files of models, and know nothing of how a model runs."""
