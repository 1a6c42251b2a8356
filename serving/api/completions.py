"""/v1/completions: raw prompts to ids, deltas to OpenAI's text objects."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from serving.api.backend import Speller, Tokenizer
from serving.api.delivery import Delta
from serving.api.generation import Prompt, tokenised
from serving.api.logprobs import Offsets, text_logprobs
from serving.api.responses import FinishReason, TextChoice, TextCompletion, TextLogprobs, Usage
from serving.api.text_body import OnePrompt, TextBody
from serving.api.vocabulary import checked_ids


async def prompts_of(body: TextBody, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts as ids; ids that come as such are checked against the vocabulary, and echoed as raw text."""
    return [
        await _prompt_of(prompt, tokenizer, field=field, echo=bool(body.echo)) for field, prompt in body.prompt.items()
    ]


async def _prompt_of(prompt: OnePrompt, tokenizer: Tokenizer, *, field: str, echo: bool) -> Prompt:
    if isinstance(prompt, str):
        ids = await tokenised(lambda: tokenizer.encode(prompt), num_chars=len(prompt))
        return Prompt(ids, field, prompt if echo else "", is_raw=True)
    ids = await tokenised(
        lambda: checked_ids(prompt, field=field, vocab_size=tokenizer.vocab_size), num_chars=len(prompt)
    )
    text = await asyncio.to_thread(tokenizer.decode_raw, ids) if echo else ""
    return Prompt(ids, field, text, is_raw=True)


@dataclass(frozen=True)
class TextFraming:
    """One answer as text objects. Mutable in that it counts the characters of each choice for `text_offset`."""

    id_prefix: ClassVar[str] = "cmpl"

    id: str
    created: int
    model: str
    speller: Speller
    _offsets: dict[int, Offsets] = field(default_factory=dict)

    def opening(self, index: int) -> list[TextCompletion]:
        return []

    def delta(self, delta: Delta) -> TextCompletion:
        return self._text([self._choice(delta)])

    def closing(self, delta: Delta) -> TextCompletion:
        return self._text([TextChoice(text="", index=delta.index, logprobs=None, finish_reason=delta.finish_reason)])

    def whole(self, choices: Sequence[Delta], usage: Usage) -> TextCompletion:
        whole = [self._choice(choice, finish_reason=choice.ended_as) for choice in choices]
        return self._text(whole).model_copy(update={"usage": usage})

    def _choice(self, delta: Delta, *, finish_reason: FinishReason | None = None) -> TextChoice:
        return TextChoice(
            text=delta.text, index=delta.index, logprobs=self._logprobs(delta), finish_reason=finish_reason
        )

    def _logprobs(self, delta: Delta) -> TextLogprobs | None:
        if delta.logprobs is None:
            return None
        offsets = self._offsets.setdefault(delta.index, Offsets(self.speller))
        return text_logprobs(delta.logprobs, self.speller, offsets)

    def _text(self, choices: list[TextChoice]) -> TextCompletion:
        return TextCompletion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
        )
