"""Draining: a server offers its chunks to its peers before its host leaves."""
