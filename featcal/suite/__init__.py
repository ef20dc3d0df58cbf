"""Read the suite file, validate it completely, and define the names of models."""
