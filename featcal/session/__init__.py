"""Cache everything that is computed of one suite, and resolve the names of its models."""
