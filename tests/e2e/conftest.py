"""The embedded model, once: what plain transformers decoding says of a few prompts."""

from collections.abc import Callable

import pytest

from serving.build import Built, build
from serving.config import EngineConfig, ModelConfig, Profile
from serving.config_rules import RuleConfig, StrictRule
from serving.models.embedded import EMBEDDED_MODEL
from serving.models.tokenizer import ChatTokenizer
from serving.requests import GenerationRequest, Limits

MAX_TOKENS = 32
QUESTIONS = (
    "Explain how rainbows form.",
    "What is 12 * 13? Think step by step.",
    "Translate to German: The tickets are valid for both shows.",
    "Repeat this list exactly: apple, pear, plum, apple, pear, plum, apple, pear, plum.",
    "def add(a, b):\n    return a + b\n\nRewrite this function with type hints.",
    "Summarize: The river rose after three days of rain. The town closed two bridges. Nobody was hurt.",
    "Write a short poem about the sea \N{WATER WAVE}.",
    "Who wrote Faust?",
)


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(EMBEDDED_MODEL)


@pytest.fixture(scope="session")
def requests(tokenizer: ChatTokenizer) -> list[GenerationRequest]:
    limits = Limits(MAX_TOKENS, tokenizer.stop_ids)
    return [
        GenerationRequest(f"q{i}", tokenizer.render_chat([{"role": "user", "content": text}]), limits)
        for i, text in enumerate(QUESTIONS)
    ]


@pytest.fixture(scope="session")
def expected(requests: list[GenerationRequest], tokenizer: ChatTokenizer) -> dict[str, list[int]]:
    """Ids of transformers' greedy generate, float32."""
    from jobs.reference import StockGenerate

    stock = StockGenerate(EMBEDDED_MODEL, "float32", stop_ids=tokenizer.stop_ids)
    outputs = stock.run([request.prompt_ids for request in requests], max_tokens=MAX_TOKENS)
    return {request.request_id: ids for request, ids in zip(requests, outputs, strict=True)}


@pytest.fixture(scope="session")
def make() -> Callable[..., Built]:
    """A float32 engine of the embedded model with any drafter, unguarded: K is what a test asks for."""

    def made(
        drafter: object, *, batch: int = 8, guard: bool = False, rule: RuleConfig | None = None, **fields: object
    ) -> Built:
        profile = Profile(
            name="test",
            target=ModelConfig(dtype="float32"),
            drafter=drafter,  # type: ignore[arg-type]
            rule=rule or StrictRule(),
            engine=EngineConfig(max_sessions=batch, max_length=512, guard=guard),
            **fields,  # type: ignore[arg-type]
        )
        return build(profile)

    return made
