"""Doors for programs that call featcal from inside themselves; each stands on the public names alone."""
