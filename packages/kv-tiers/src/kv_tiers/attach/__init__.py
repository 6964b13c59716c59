"""What every engine's package needs to attach a cache to its engine: settings, the cache's place, the model's name."""
