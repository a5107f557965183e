"""Pure functions on arrays: the pieces a model's forward is made of."""
