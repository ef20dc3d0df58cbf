"""Measure many models in the same way, and keep the measurements."""
