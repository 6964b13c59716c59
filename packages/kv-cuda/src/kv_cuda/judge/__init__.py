"""What a lossy format does to a model's answers, measured on that model."""
