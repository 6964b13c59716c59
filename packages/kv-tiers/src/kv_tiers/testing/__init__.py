"""Contracts of caches, policies, tiers and codecs as test classes to inherit, and a reference model of a cache."""
