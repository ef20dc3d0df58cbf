"""Write suite files: from a form, from paths, from the recipes of other tools, and back."""
