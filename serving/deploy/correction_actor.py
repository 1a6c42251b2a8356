"""The hub of CSD's online memory as a Ray actor, shared by all Targets of a profile's target and drafter."""

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from serving.build_rules import memory_identity
from serving.compiling import cache_root
from serving.config import Profile
from serving.config_rules import CsdControls
from serving.deploy.corrections import CorrectionHub, CorrectionSync, Exchange, Totals
from serving.memory.online import OnlineMemory
from serving.models.tokenizer import ChatTokenizer

log = logging.getLogger("ray.serve")

NAMESPACE = "drafthouse"
PERIOD_S = 2.0
_ALONE_S = 60.0
_LAST_WORD_S = 2.0


class CorrectionActor:
    """One hub, whoever asks for it first. It saves what is new, and leaves when no Target has called for a minute."""

    def __init__(self, identity: str, max_pairs: int, path: str) -> None:
        self._hub = CorrectionHub(identity=identity, max_pairs=max_pairs, path=Path(path))
        self._called_s = time.monotonic()
        self._watching: asyncio.Task[None] | None = None

    async def exchange(self, call: Exchange) -> Totals:
        self._called_s = time.monotonic()
        self._watching = self._watching or asyncio.get_running_loop().create_task(self._watch())
        return self._hub.exchange(call)

    async def _watch(self) -> None:
        while time.monotonic() - self._called_s < _ALONE_S:
            await asyncio.sleep(PERIOD_S)
            self._hub.keep()
        ray.kill(ray.get_runtime_context().current_actor)


class CorrectionLink:
    """A Target's way to the hub: started where there is none, started again when it has died."""

    def __init__(self, memory: OnlineMemory, *, identity: str, max_pairs: int, path: Path) -> None:
        self._arguments = (identity, max_pairs, str(path))
        self._name = f"corrections-{identity}"
        self._sync = CorrectionSync(memory, self._call)
        self._is_lost = False

    @classmethod
    def of(cls, profile: Profile, tokenizer: ChatTokenizer, memory: OnlineMemory) -> "CorrectionLink":
        """For the memory of one Target; its counts are kept where the profile says, else in the cache."""
        rule, identity = cast(CsdControls, profile.rule), memory_identity(profile, tokenizer)
        path = Path(rule.store) if rule.store else cache_root() / "corrections" / f"{identity}.parquet"
        return cls(memory, identity=identity, max_pairs=rule.max_pairs, path=path)

    async def exchange_for_ever(self, *, period_s: float = PERIOD_S) -> None:
        """Until cancelled, and once more then: requests that have ended since are told, for nobody can later.

        A hub out of reach costs nothing but news: what was met is told when one is there again.
        """
        try:
            while True:
                await asyncio.sleep(period_s)
                await self._exchange()
        except asyncio.CancelledError:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._exchange(), _LAST_WORD_S)
            raise

    async def _exchange(self) -> None:
        try:
            await self._sync.exchange()
        except RayError as error:
            if not self._is_lost:
                log.warning("correction memory: the hub is out of reach, trying again: %s", type(error).__name__)
            self._is_lost = True
            return
        if self._is_lost:
            log.info("correction memory: the hub is back")
        self._is_lost = False

    async def _call(self, call: Exchange) -> Totals:
        hub = ray.remote(CorrectionActor).options(
            name=self._name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=0
        )
        actor = cast("ActorHandle[CorrectionActor]", hub.remote(*self._arguments))
        totals: Totals = await actor.exchange.remote(call)
        return totals
