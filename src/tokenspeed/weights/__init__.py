"""Weights: what a model declares, and where its tensors come from."""
