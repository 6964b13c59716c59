"""A directory of what all hosts hold: changes stream through Valkey into a mirror in each server's memory."""
