"""Define inputs, result and shared parts of methods other than calibration."""
