"""Read the suite file, completely validated, and say what a model may be called."""
