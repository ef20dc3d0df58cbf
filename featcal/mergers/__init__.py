"""Merge upstream: functions from the base's tensor and the experts' tensors to one merged tensor."""
