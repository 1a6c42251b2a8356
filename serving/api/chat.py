"""/v1/chat/completions: messages to prompt ids, deltas to OpenAI's chat objects."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from serving.api.backend import Speller, Tokenizer
from serving.api.chat_body import ChatBody
from serving.api.delivery import Delta
from serving.api.generation import Prompt, tokenised
from serving.api.logprobs import chat_logprobs
from serving.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatDeltaChoice,
    ChatLogprobs,
    ChatMessage,
    FinishReason,
    Usage,
)
from serving.types import TokenLogprob


async def prompts_of(body: ChatBody, tokenizer: Tokenizer) -> list[Prompt]:
    """The conversation by the model's own template."""
    turns = [message.turn for message in body.messages]
    num_chars = sum(len(turn["content"]) for turn in turns)
    return [Prompt(await tokenised(lambda: tokenizer.render_chat(turns), num_chars=num_chars), "messages")]


@dataclass(frozen=True)
class ChatFraming:
    """One answer as chat objects; each choice has its role first."""

    id_prefix: ClassVar[str] = "chatcmpl"

    id: str
    created: int
    model: str
    speller: Speller

    def opening(self, index: int) -> list[ChatChunk]:
        return [self._chunk(index, ChatDelta(role="assistant", content=""))]

    def delta(self, delta: Delta) -> ChatChunk:
        return self._chunk(delta.index, ChatDelta(content=delta.text), logprobs=self._logprobs(delta.logprobs))

    def closing(self, delta: Delta) -> ChatChunk:
        return self._chunk(delta.index, ChatDelta(), finish_reason=delta.finish_reason)

    def whole(self, choices: Sequence[Delta], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=[self._choice(choice) for choice in choices],
            usage=usage,
        )

    def _choice(self, choice: Delta) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(role="assistant", content=choice.text, refusal=None),
            logprobs=self._logprobs(choice.logprobs),
            finish_reason=choice.ended_as,
        )

    def _logprobs(self, entries: Iterable[TokenLogprob] | None) -> ChatLogprobs | None:
        return None if entries is None else chat_logprobs(entries, self.speller)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: FinishReason | None = None,
    ) -> ChatChunk:
        choice = ChatDeltaChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=[choice],
        )
