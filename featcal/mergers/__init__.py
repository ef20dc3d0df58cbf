"""Merge models: each merger is a function of the base's tensor and the experts' tensors
that returns one merged tensor.
"""
