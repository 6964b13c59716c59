"""A tokenizer for tiny models, for what does not start or judge without one."""

from pathlib import Path


def with_words(model: Path) -> str:
    """Adds a tokenizer to the model in this directory whose token 17 is the word w17. Returns the directory's path."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(2048)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(model)
    return str(model)


def some_text(words: int = 2300) -> str:
    """Words of that tokenizer."""
    return " ".join(f"w{3 + (7919 * number) % 1900}" for number in range(words))
