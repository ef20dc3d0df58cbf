"""Fit methods of others beside calibration, on the same calibration samples."""
