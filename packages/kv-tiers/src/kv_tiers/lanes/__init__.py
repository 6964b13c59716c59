"""The queue in front of each tier: threads, batches, and the health of the tier behind them."""
