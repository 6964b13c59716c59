"""Commands that start, watch or question a server."""
