"""Measure where a merged model drifts from its experts (Props. 1 to 8)."""
