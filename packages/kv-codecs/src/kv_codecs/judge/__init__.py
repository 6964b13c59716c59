"""`kv judge`: measures what a lossy format does to a model's answers."""
