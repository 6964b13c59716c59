"""Host memory for chunks, in equal slots that processes can share or inherit."""
