"""Score models on tasks."""
