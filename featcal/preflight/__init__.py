"""Find all problems of a suite at once, and estimate the cost of a calibration."""
