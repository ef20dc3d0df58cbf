"""Keep everything that is computed of one suite, and name its models."""
