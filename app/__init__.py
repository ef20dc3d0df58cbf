"""Shared view code of the app; the pages are in `pages/`, the numbers come from `featcal`."""
