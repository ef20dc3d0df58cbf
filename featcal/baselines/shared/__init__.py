"""What methods beside calibration have in common: what they are handed, what they give, and parts of them."""
