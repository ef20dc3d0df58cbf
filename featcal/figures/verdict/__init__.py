"""Put the measurements of a model into words: the same lines in the app, on the command line and in a report."""
