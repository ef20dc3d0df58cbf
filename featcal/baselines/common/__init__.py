"""Hand methods beside calibration their input, take their model, and share parts of them."""
