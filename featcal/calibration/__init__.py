"""Calibrate a merged model in closed form, block by block (Algorithm 1)."""
