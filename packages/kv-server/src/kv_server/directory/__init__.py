"""A directory of what every server holds: a stream of changes in Valkey, and a mirror in each server's memory."""
