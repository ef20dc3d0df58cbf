"""Hand tensors to mergers, and share parts of their mathematics."""
