"""What happens in a cache, for those who watch it: `bus.py` carries, `events.py` says what, the rest subscribe."""
