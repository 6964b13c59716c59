"""Contracts of policies, tiers and codecs, as test classes to inherit."""
