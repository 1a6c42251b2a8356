"""The runs of an audit: every arm answers each group of prompts, and what was answered is kept a line a group."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from serving.build import Built, build
from serving.config import Profile
from serving.decode.offline import Completion, complete
from serving.errors import ConfigError
from serving.requests import GenerationRequest, Limits, Receipt, Tightening
from tuning.audit_records import PLAIN, STRICT, Answer, ArmRun, Group, read_records
from tuning.prompts import Prompt


@dataclass
class AuditRuns:
    """An engine a profile; plain and strict are requests that tighten the first. Drafts are not guarded.

    Memories and prefixes are salted by arm, so no arm answers from what another one left behind.
    """

    profiles: Sequence[Profile]
    prompts: Sequence[Prompt]
    max_tokens: int
    path: Path
    _engines: dict[str, Built] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Raises ConfigError unless the profiles differ in their rules alone: strict is the same for all."""
        names = [profile.name for profile in self.profiles]
        for name in names:
            if name in (PLAIN, STRICT):
                raise ConfigError(f"--profile: {name!r} is what others are compared with; give another one")
            if names.count(name) > 1:
                raise ConfigError(f"--profile: two of them are named {name!r}; give them names of their own")
        first, *others = map(_unguarded, self.profiles)
        for profile in others:
            for part in ("target", "drafter", "max_draft", "engine"):
                if getattr(profile, part) != getattr(first, part):
                    raise ConfigError(
                        f"--profile: {profile.name!r} and {first.name!r} differ in `{part}`, so strict decoding "
                        "would not be the same for both; audit them apart"
                    )

    @property
    def arms(self) -> tuple[str, ...]:
        return (PLAIN, STRICT, *(profile.name for profile in self.profiles))

    @property
    def batch(self) -> int:
        return self.profiles[0].engine.max_sessions

    @property
    def key(self) -> str:
        """What a line depends on besides its place; receipts of another release count other things."""
        ids = "\0".join(f"{prompt.id}\0{prompt.text}" for prompt in self.prompts)
        counts = ",".join(one.name for one in fields(Receipt))
        engine = _unguarded(self.profiles[0]).engine.model_dump_json()
        profiles = (f"{profile.name} {profile.hash}" for profile in self.profiles)
        parts = (*profiles, engine, str(self.max_tokens), ids, counts)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def groups(self) -> Iterator[Group]:
        """Group by group, first what an earlier run has left. Every second group takes the arms backwards."""
        known = read_records(self.path, Group, self.key)
        yield from known
        with self.path.open("a", encoding="utf-8") as out:
            for number in range(len(known), -(-len(self.prompts) // self.batch)):
                prompts = self.prompts[number * self.batch : (number + 1) * self.batch]
                order = self.arms if number % 2 == 0 else self.arms[::-1]
                group = Group(key=self.key, number=number, runs={arm: self._run(arm, number, prompts) for arm in order})
                out.write(group.model_dump_json() + "\n")
                out.flush()
                yield group

    def engine(self, arm: str) -> Built:
        """Built on first use: a finished audit is evaluated again without it. Nobody pays for the first passes."""
        profile = next((one for one in self.profiles if one.name == arm), self.profiles[0])
        if profile.name not in self._engines:
            built = self._engines[profile.name] = build(_unguarded(profile))
            for warmed in (arm, PLAIN):
                requests = self.requests(built, warmed, "warm-up", self.prompts[:1], max_tokens=8)
                list(complete(built.scheduler, requests))
        return self._engines[profile.name]

    @staticmethod
    def requests(
        built: Built, arm: str, group: str, prompts: Sequence[Prompt], *, max_tokens: int
    ) -> list[GenerationRequest]:
        tokenizer = built.tokenizer
        requests = []
        for prompt in prompts:
            ids = tokenizer.render_chat([{"role": "user", "content": prompt.text}])
            request = GenerationRequest(
                f"{arm}-{group}-{prompt.id}",
                ids,
                Limits(max_tokens, tokenizer.stop_ids),
                max_draft=0 if arm == PLAIN else None,
                salt=arm,
                tightening=Tightening(is_strict=arm in (PLAIN, STRICT)),
                wants_tiers=True,
            )
            built.limits.check(request)
            requests.append(request)
        return requests

    def _run(self, arm: str, number: int, prompts: Sequence[Prompt]) -> ArmRun:
        built = self.engine(arm)
        scheduler = built.scheduler
        requests = self.requests(built, arm, str(number), prompts, max_tokens=self.max_tokens)
        before, started_s = scheduler.stats.copy(), time.perf_counter()
        done = {one.request_id: one for one in complete(scheduler, requests)}
        seconds, after = time.perf_counter() - started_s, scheduler.stats
        pairs = zip(prompts, requests, strict=True)
        return ArmRun(
            seconds=seconds,
            answers=tuple(_answer(prompt, request, done[request.request_id]) for prompt, request in pairs),
            num_drafts=after.num_drafts - before.num_drafts,
            accepted_at=_grown(before.accepted_at, after.accepted_at),
            first_mismatches=_grown(before.first_mismatches, after.first_mismatches),
        )


def _unguarded(profile: Profile) -> Profile:
    return profile.model_copy(update={"engine": profile.engine.model_copy(update={"guard": False})})


def _answer(prompt: Prompt, request: GenerationRequest, done: Completion) -> Answer:
    assert done.finish_reason is not None, "it is complete"
    return Answer(
        prompt_id=prompt.id,
        prompt_ids=tuple(request.prompt_ids.tolist()),
        output_ids=tuple(done.output_ids),
        text=done.text,
        finish_reason=done.finish_reason,
        receipt=done.receipt,
        exceptions=tuple(done.exceptions),
        tiers=tuple(done.tiers),
    )


def _grown(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    known = [*before, *[0] * (len(after) - len(before))]
    return tuple(new - old for old, new in zip(known, after, strict=True))
