"""Supply mergers with tensors, and hold the mathematics that several mergers share."""
