"""The application under test, from outside: requests by handle, status, and the sessions each role holds."""

import asyncio
from dataclasses import dataclass

from ray import serve

from jobs.deploying import APP_NAME
from serving.app import AppArgs, app
from serving.config import load_profile
from serving.decode.offline import complete
from serving.deploy.options import Scaling
from serving.deploy.target_client import TargetClient
from serving.requests import Chunk, GenerationRequest, Limits
from serving.types import as_ids

PROMPT = as_ids([1, 30, 40, 50, 30, 40, 50, 30])


def request(name: str, max_tokens: int = 600, *, prompt=PROMPT, max_draft: int | None = None) -> GenerationRequest:
    return GenerationRequest(name, as_ids(prompt), Limits(max_tokens), max_draft=max_draft)


def run_app(profile: str, *, name: str = APP_NAME, **fields) -> "Application":
    """Deploy, on half a CPU a role unless `fields` say otherwise, and wait until it runs."""
    half = Scaling(num_cpus=0.5)
    args = AppArgs(**{"profile": profile, "target": half, "drafter": half} | fields)
    prefix = "/" if name == APP_NAME else f"/{name}"
    serve.run(app(args), name=name, route_prefix=prefix)
    return Application(name)


@dataclass(frozen=True)
class Application:
    name: str

    @property
    def client(self) -> TargetClient:
        return TargetClient(serve.get_deployment_handle("Target", self.name))

    def status(self):
        return serve.get_deployment_handle("Target", self.name).status.remote().result(timeout_s=30)

    def drafter_sessions(self) -> list[tuple[str, str]]:
        return serve.get_deployment_handle("Drafter", self.name).sessions.remote().result(timeout_s=30)

    def is_whole(self) -> bool:
        return not self.status().degraded

    def is_empty(self) -> bool:
        """Whether the target has nothing in work."""
        status = self.status()
        return (status.running, status.waiting) == (0, 0)

    def begin_and_leave(self, count: int, max_tokens: int) -> None:
        """`count` streams, twenty at a time, each left after one to seven chunks."""

        async def leave(number: int) -> None:
            stream = self.client.generate(request(f"cancel {number}", max_tokens))
            chunks = 0
            async for _ in stream:
                chunks += 1
                if chunks > number % 7:
                    break
            await stream.aclose()

        async def leave_together() -> None:
            for start in range(0, count, 20):
                await asyncio.gather(*(leave(number) for number in range(start, min(start + 20, count))))

        asyncio.run(leave_together())


@dataclass
class Story:
    """What a client keeps of one stream."""

    ids: list[int]
    text: str
    last: Chunk

    @classmethod
    def of(cls, chunks: list[Chunk]) -> "Story":
        return cls([i for c in chunks for i in c.ids], "".join(c.text for c in chunks), chunks[-1])

    @property
    def result(self):
        return self.ids, self.text, self.last.finish_reason


def plainly(profile_path: str, *requests: GenerationRequest):
    """What the same requests give in this process without any drafter: (ids, text, reason) by request."""
    from serving.build import build
    from serving.config import FullVerifier, NoDrafter

    profile = load_profile(profile_path).model_copy(update={"drafter": NoDrafter(), "verifier": FullVerifier()})
    done = complete(build(profile).scheduler, requests)
    return {c.request_id: (c.output_ids, c.text, c.finish_reason) for c in done}
