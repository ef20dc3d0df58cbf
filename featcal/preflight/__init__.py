"""Find every problem of a suite at once, and estimate what a calibration takes."""
