"""Write suite files: from a form, from paths, and from the recipes of other tools; export them to these tools."""
