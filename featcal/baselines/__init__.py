"""Fit other methods than calibration, on the same calibration samples."""
