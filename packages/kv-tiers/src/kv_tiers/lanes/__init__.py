"""Lanes: the bounded queue in front of each tier, with its threads, its checks, the tier's health."""
