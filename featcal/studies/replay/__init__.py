"""Repeat the run behind a `featcal.json` and compare, bit for bit."""
