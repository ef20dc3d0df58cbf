"""What a suite file may say of its parts: where samples come from, how a model is merged."""
