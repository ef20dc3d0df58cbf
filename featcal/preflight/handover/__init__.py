"""Check whether another program can read a written folder, and print the exact next commands."""
