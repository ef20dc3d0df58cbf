"""Configurations for Hydra, which finds them by `pkg://featcal.integrations.configs`."""
