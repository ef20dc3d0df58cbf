"""Let other programs call featcal from inside themselves; modules here use only featcal's public names."""
