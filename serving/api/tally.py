"""The choices of one answer side by side: who they are, whether all have begun, and what usage says of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.api.delivery import Delivery
from serving.api.generation import Prompt
from serving.api.responses import CompletionTokensDetails, PromptTokensDetails, Usage
from serving.requests import GenerationRequest, Receipt


@dataclass(frozen=True)
class Tally:
    """The choices of one answer, `num_per_prompt` for each prompt, in the order of their indices."""

    completion_id: str
    num_per_prompt: int
    deliveries: Sequence[Delivery]

    @classmethod
    def of(cls, completion_id: str, prompts: Sequence[Prompt], requests: Sequence[GenerationRequest]) -> "Tally":
        """Nothing delivered yet; `requests` has as many for each of `prompts`, in their order."""
        num_per_prompt = len(requests) // len(prompts)
        deliveries = [
            Delivery(
                index,
                len(request.prompt_ids),
                wants_logprobs=request.num_logprobs is not None,
                wants_tiers=request.wants_tiers,
                echo=prompts[index // num_per_prompt].echo,
            )
            for index, request in enumerate(requests)
        ]
        return cls(completion_id, num_per_prompt, deliveries)

    @property
    def has_begun(self) -> bool:
        """Whether every choice has been admitted and was given something."""
        return all(delivery.has_begun for delivery in self.deliveries)

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(delivery.num_prompt_tokens for delivery in self.deliveries[:: self.num_per_prompt])

    @property
    def num_tokens(self) -> int:
        return sum(delivery.num_tokens for delivery in self.deliveries)

    @property
    def usage(self) -> Usage:
        receipts = [delivery.receipt or Receipt() for delivery in self.deliveries]
        accepted = sum(receipt.accepted for receipt in receipts)
        drafted = sum(receipt.drafted for receipt in receipts)
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_tokens,
            total_tokens=self.num_prompt_tokens + self.num_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached(receipts), audio_tokens=0),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=drafted - accepted,
                reasoning_tokens=0,
                audio_tokens=0,
            ),
        )

    def _num_cached(self, receipts: Sequence[Receipt]) -> int:
        """What no choice of a prompt had to compute: the rest was computed once at least."""
        cached, n = [receipt.cached_tokens for receipt in receipts], self.num_per_prompt
        return sum(min(cached[first : first + n]) for first in range(0, len(cached), n))
