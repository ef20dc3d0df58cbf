"""Check whether a written folder can be handed on to another program, and say what follows to the letter."""
