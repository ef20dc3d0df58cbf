"""Run what wrote a `featcal.json` again and compare, bit for bit."""
