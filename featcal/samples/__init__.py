"""Draw samples of a task and prepare them as its model's own library does."""
