"""Operators' verbs over all servers of a directory."""
