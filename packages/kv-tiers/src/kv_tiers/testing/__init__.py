"""Contracts of policies, tiers, codecs, as test classes to inherit."""
