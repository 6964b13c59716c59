"""The facts of a client that its server reads. All others are for the engine's own processes.

A server ignores those that it does not know, so a new one needs no other version of the protocol.
"""

from typing import Final

CHUNK_TOKENS: Final = "chunk_tokens"
"""Tokens of its chunks, in decimal digits."""
MODEL_NAME: Final = "model_name"
"""Its model, as the engine was told: a directory or a hub's name."""
REPEATS_LOOKUPS: Final = "repeats_lookups"
"""Another process of the engine looks the same prompts up, as other ranks of SGLang do."""
READS_TOGETHER: Final = "reads_together"
"""Other processes of the engine read the same chunks. So no read of theirs ends a hold: one of them says when all have
read (`taken`)."""
