"""Text to ids and back, and the ids that end a turn. No torch here: a gateway needs only this."""

import hashlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from serving.errors import ModelError, RequestError
from serving.models.pieces import byte_level, sentencepiece, shown
from serving.models.source import resolve_model
from serving.types import Ids, as_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatTokenizer:
    """The tokenizer of one model, with its chat template and its whole list of stop ids."""

    name: str
    stop_ids: frozenset[int]
    vocab_size: int
    _tokenizer: Any

    @classmethod
    def load(cls, model: str) -> "ChatTokenizer":
        """By the embedded name, a Hub id, a folder or a GGUF file. Raises ModelError in one line."""
        from transformers import AutoTokenizer, GenerationConfig

        source = resolve_model(model)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.location, **source.tokenizer_options)
        except (OSError, ValueError) as error:
            raise ModelError(f"model {model!r}: no tokenizer could be loaded: {_first_line(error)}") from None
        stops = {tokenizer.eos_token_id}
        try:
            ends = GenerationConfig.from_pretrained(source.location).eos_token_id
            stops.update(ends if isinstance(ends, list) else [ends])
        except OSError:  # GGUF files and bare checkpoints have no generation config: the tokenizer's stop is all
            log.debug("model %r has no generation config", model)
        return cls(
            name=Path(model).name,
            stop_ids=frozenset(stop for stop in stops if stop is not None),
            vocab_size=len(tokenizer),
            _tokenizer=tokenizer,
        )

    def encode(self, text: str) -> Ids:
        """Raw text to ids, with the special tokens that the model puts before a text, if any."""
        return as_ids(self._tokenizer(text)["input_ids"])

    def render_chat(self, messages: Sequence[dict[str, str]]) -> Ids:
        """A conversation to ids by the model's own template, up to the assistant's turn."""
        if self._tokenizer.chat_template is None:
            raise RequestError("messages", f"model {self.name!r} has no chat template; use /v1/completions")
        contents = [message["content"] for message in messages]
        if any(token in content for content in contents for token in self._tokenizer.all_special_tokens):
            return self._render_apart(messages, contents)
        return self.encode_raw(self._rendered(messages))

    def _rendered(self, messages: Sequence[dict[str, str]]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:  # a template's own refusal, such as "system role not supported"
            raise RequestError("messages", f"the chat template of {self.name!r} refuses them: {error}") from None
        return text

    def _render_apart(self, messages: Sequence[dict[str, str]], contents: Sequence[str]) -> Ids:
        """Words that spell a special token stay words: a user must not be able to open a turn of the system.

        Contents are tokenised apart from the template, which marks their places.
        """
        marks = [f"@{uuid.uuid4().hex}@" for _ in contents]
        marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        rest, pieces = self._rendered(marked), []
        for mark, content in zip(marks, contents, strict=True):
            before, found, rest = rest.partition(mark)
            if not found:
                raise RequestError("messages", f"the template of {self.name!r} drops a message with special tokens")
            words = self._tokenizer(content, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            pieces += [self.encode_raw(before), as_ids(words)]
        return np.concatenate([*pieces, self.encode_raw(rest)])

    def encode_raw(self, text: str) -> Ids:
        """Text that spells out its special tokens, to ids; nothing is added."""
        return as_ids(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode_raw(self, ids: Sequence[int] | Ids) -> str:
        """Ids to text with the special tokens spelled out."""
        text: str = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    def tokens(self) -> list[str | None]:
        """Every token by id; None where an id has none."""
        names: list[str | None] = self._tokenizer.convert_ids_to_tokens(range(self.vocab_size))
        return names

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for, be it half a character; special tokens spelled out, nothing for an unknown id."""
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self._tokenizer.added_tokens_decoder:
            return piece.encode()
        return byte_level(piece) if self._is_byte_level else sentencepiece(piece)

    def token_text(self, token: int) -> str:
        """One token as text; OpenAI's `bytes:\\xNN` where its bytes are no whole characters."""
        return shown(self.token_bytes(token))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the vocabulary: what ids mean."""
        return hashlib.sha256(repr(self.tokens()).encode()).hexdigest()[:16]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that leave no trace in the text of an answer."""
        return frozenset(token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special)

    @cached_property
    def _is_byte_level(self) -> bool:
        """A space is U+0120 in byte-level vocabularies and U+2581, which they cannot spell, in sentencepiece's."""
        pieces = self._tokenizer.get_vocab()
        return "\u0120" in pieces and "\u2581" not in pieces

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text; special tokens leave no trace."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
