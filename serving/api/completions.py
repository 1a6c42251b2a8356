"""/v1/completions: a raw prompt to ids, chunks to OpenAI's text objects."""

from dataclasses import dataclass
from typing import ClassVar

from serving.api.backend import Tokenizer
from serving.api.delivery import Delivery
from serving.api.generation import Prompt, tokenised
from serving.api.responses import FinishReason, TextChoice, TextCompletion
from serving.api.schema import TextBody
from serving.errors import RequestError
from serving.types import as_ids


async def prompt_of(body: TextBody, tokenizer: Tokenizer) -> Prompt:
    """The prompt as ids; ids that come as such are checked against the vocabulary."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return Prompt(await tokenised(lambda: tokenizer.encode(prompt), num_chars=len(prompt)), "prompt")
    for index, token in enumerate(prompt):
        if not 0 <= token < tokenizer.vocab_size:
            last = tokenizer.vocab_size - 1
            raise RequestError(f"prompt.{index}", f"is not a token id of this model; they go from 0 to {last}")
    return Prompt(as_ids(prompt), "prompt")


@dataclass(frozen=True)
class TextFraming:
    """One answer as text objects."""

    id_prefix: ClassVar[str] = "cmpl"

    id: str
    created: int
    model: str

    def opening(self) -> list[TextCompletion]:
        return []

    def delta(self, text: str) -> TextCompletion:
        return self._text(text)

    def closing(self, delivery: Delivery) -> TextCompletion:
        return self._text("", delivery.ended_as).model_copy(update={"speculation": delivery.speculation})

    def whole(self, delivery: Delivery) -> TextCompletion:
        answer = self._text(delivery.text, delivery.ended_as)
        return answer.model_copy(update={"usage": delivery.usage, "speculation": delivery.speculation})

    def _text(self, text: str, finish_reason: FinishReason | None = None) -> TextCompletion:
        return TextCompletion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=[TextChoice(index=0, text=text, logprobs=None, finish_reason=finish_reason)],
        )
