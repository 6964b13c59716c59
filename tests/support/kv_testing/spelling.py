"""A tokenizer for tiny models, for what does not start or judge without one."""

from pathlib import Path
from typing import Final

TOOL_CALL: Final = 2047
_TOOL_CALL: Final = "</tool_call>"


def with_words(model: Path) -> str:
    """Adds a tokenizer to the model in this directory whose token 17 is the word w17, and whose last one ends a call of
    a tool. Returns the directory's path."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spelled = {f"w{number}": number for number in range(TOOL_CALL)} | {_TOOL_CALL: TOOL_CALL}
    words = Tokenizer(models.WordLevel(spelled, unk_token="w0"))
    words.add_tokens([_TOOL_CALL])
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(model)
    return str(model)


def some_text(words: int = 2300) -> str:
    """Words of that tokenizer."""
    return " ".join(f"w{3 + (7919 * number) % 1900}" for number in range(words))
