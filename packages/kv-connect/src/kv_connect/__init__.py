"""Connects a cache to an engine without importing one."""
