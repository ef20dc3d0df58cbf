"""Upstream mergers: functions from the base's tensor and the experts' tensors to one merged tensor."""
