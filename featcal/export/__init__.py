"""Write models for other libraries, and verify them."""
