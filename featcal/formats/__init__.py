"""Read and write files of models, without knowledge of how a model runs."""
