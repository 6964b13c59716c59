"""Lanes: the bounded queue in front of each tier, with the threads that call it."""
