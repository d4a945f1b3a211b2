"""A byte-level tokenizer of 512 tokens, built from rules: decode(encode(text)) == text, special tokens apart.

No training and no download, so that it is the same file everywhere and for every seed.
"""

import json
from itertools import product
from pathlib import Path

VOCAB_SIZE = 512
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, _, EOS_ID = range(len(_SPECIALS))

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VOWELS = "aeiou"
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"


def write(directory: Path, *, context_tokens: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template into `directory`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = _merges()
    tokens = [*_SPECIALS, *_byte_symbols(), *("".join(pair) for pair in merges)]
    tokens += [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "pad_token": _SPECIALS[PAD_ID],
        "eos_token": _SPECIALS[EOS_ID],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _merges() -> list[tuple[str, str]]:
    """Two-letter tokens that ordinary words are made of; "Ġ" is how byte-level vocabularies write a space."""
    syllables = [*product(_CONSONANTS, _VOWELS), *product(_VOWELS, _CONSONANTS)]
    word_starts = [("Ġ", letter) for letter in sorted(_VOWELS + _CONSONANTS)]
    return [*syllables, *word_starts]


def _byte_symbols() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())
