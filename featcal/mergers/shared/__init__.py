"""What mergers have in common: how they are handed tensors, and parts of their mathematics."""
