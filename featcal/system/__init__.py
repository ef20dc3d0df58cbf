"""Know nothing of models: errors, text that is shown, files, limits, processes."""
