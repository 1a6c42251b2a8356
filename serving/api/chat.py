"""/v1/chat/completions: messages to prompt ids, chunks to OpenAI's chat objects."""

from dataclasses import dataclass
from typing import ClassVar

from serving.api.backend import Tokenizer
from serving.api.delivery import Delivery
from serving.api.generation import Prompt, tokenised
from serving.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatDeltaChoice,
    ChatMessage,
    FinishReason,
)
from serving.api.schema import ChatBody


async def prompt_of(body: ChatBody, tokenizer: Tokenizer) -> Prompt:
    """The conversation by the model's own template."""
    turns = [message.turn for message in body.messages]
    num_chars = sum(len(turn["content"]) for turn in turns)
    return Prompt(await tokenised(lambda: tokenizer.render_chat(turns), num_chars=num_chars), "messages")


@dataclass(frozen=True)
class ChatFraming:
    """One answer as chat objects; the role comes first."""

    id_prefix: ClassVar[str] = "chatcmpl"

    id: str
    created: int
    model: str

    def opening(self) -> list[ChatChunk]:
        return [self._chunk(ChatDelta(role="assistant", content=""))]

    def delta(self, text: str) -> ChatChunk:
        return self._chunk(ChatDelta(content=text))

    def closing(self, delivery: Delivery) -> ChatChunk:
        last = self._chunk(ChatDelta(), delivery.ended_as)
        return last.model_copy(update={"speculation": delivery.speculation})

    def whole(self, delivery: Delivery) -> ChatCompletion:
        choice = ChatChoice(message=ChatMessage(content=delivery.text), finish_reason=delivery.ended_as)
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[choice],
            usage=delivery.usage,
            speculation=delivery.speculation,
        )

    def _chunk(self, delta: ChatDelta, finish_reason: FinishReason | None = None) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=[ChatDeltaChoice(index=0, delta=delta, logprobs=None, finish_reason=finish_reason)],
        )
