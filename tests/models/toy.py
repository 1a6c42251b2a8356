"""A tiny random model on disk with a tokenizer of words: `t5` is token 5, and a chat template."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import VOCAB, tiny_model

_TEMPLATE = "t1 {% for message in messages %}{{ message['content'] }} t3 {% endfor %}"


def save_toy(folder: Path, **overrides: object) -> str:
    """Written to `folder`; `overrides` are keys of the model's config, or its seed."""
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", chat_template=_TEMPLATE)
    tokenizer.save_pretrained(folder)
    tiny_model("llama", **overrides).save_pretrained(folder)
    return str(folder)
