"""Open a suite: its base, its experts and its merged model, checked against each other."""
