"""Journeys through the app in a real browser, and many sessions at once: `make e2e`."""
