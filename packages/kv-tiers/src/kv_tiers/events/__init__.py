"""What happens in a cache, as records, and the bus that carries them to subscribers."""
