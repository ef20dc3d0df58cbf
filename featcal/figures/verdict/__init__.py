"""Say in words what the measurements of a model say: the same lines in the app, on the command line and in a report."""
