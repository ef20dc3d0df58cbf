"""Describe the architectures: one file each, their facts, and the registry that finds them."""
