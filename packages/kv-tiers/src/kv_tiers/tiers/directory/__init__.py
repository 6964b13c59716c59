"""What every server holds, known to all of them: a stream of changes in Valkey, and each server's mirror in memory."""
