"""The identity of a model's weights, so that no two models share a key space."""
