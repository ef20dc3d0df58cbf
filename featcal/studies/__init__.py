"""Measure many models alike, and keep what was measured."""
