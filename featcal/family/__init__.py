"""Open a suite: its base, its experts and its merged model, held against each other."""
