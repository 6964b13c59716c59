"""Contracts of tiers, codecs, as test classes to inherit."""
