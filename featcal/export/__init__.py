"""Write models that other libraries load, and verify them."""
