"""Strict runs over prompts, with what was rejected kept a line a prompt, so that a killed run goes on."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jobs.json_lines import read_lines
from serving.build import build
from serving.build_rules import models_identity
from serving.config import Profile
from serving.config_rules import StrictRule
from serving.decode.offline import complete
from serving.errors import ConfigError, RequestError
from serving.requests import GenerationRequest, Limits
from tuning.mismatches import Mismatch, RecordingBook
from tuning.prompts import Prompt


@dataclass(frozen=True)
class Recording:
    """Which profile is run, how long its answers may be, and where what was found is kept."""

    profile: Profile
    max_tokens: int
    path: Path

    @property
    def strict(self) -> Profile:
        """The same target and drafter, every token the target's own, K as the profile says."""
        engine = self.profile.engine.model_copy(update={"guard": False})
        return self.profile.model_copy(update={"rule": StrictRule(), "engine": engine})

    @cached_property
    def key(self) -> str:
        """What the lines of `path` depend on besides their prompts: models by content, they may be trained anew."""
        parts = (self.strict.model_dump_json(), models_identity(self.profile), str(self.max_tokens))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def record_mismatches(recording: Recording, prompts: Sequence[Prompt]) -> Iterator[list[Mismatch]]:
    """One list a prompt, first those that an earlier run has found. A prompt that does not fit has none."""
    known = _read(recording, prompts)
    left = [prompt for prompt in prompts if prompt.id not in known]
    for prompt in prompts:
        if prompt.id in known:
            yield known[prompt.id]
    if not left:
        return
    book = RecordingBook()
    built = build(recording.strict, rules=book)
    requests, texts = [], _texts(left)
    with recording.path.open("a", encoding="utf-8") as out:
        for prompt in left:
            ids = built.tokenizer.render_chat([{"role": "user", "content": prompt.text}])
            request = GenerationRequest(prompt.id, ids, Limits(recording.max_tokens, built.tokenizer.stop_ids))
            try:
                built.limits.check(request)
            except RequestError:  # too long for this profile: nothing to learn from it
                yield []
                continue
            requests.append(request)
        for done in complete(built.scheduler, requests):
            found = book.found.pop(done.request_id)
            record = {"key": recording.key, "id": done.request_id, "text": texts[done.request_id], "found": found}
            out.write(json.dumps(record) + "\n")
            out.flush()
            yield found


def _texts(prompts: Sequence[Prompt]) -> dict[str, str]:
    """What each prompt says, by its id, as 16 hex digits."""
    return {prompt.id: hashlib.sha256(prompt.text.encode()).hexdigest()[:16] for prompt in prompts}


def _read(recording: Recording, prompts: Sequence[Prompt]) -> dict[str, list[Mismatch]]:
    """What is on file; a half-written last line is dropped, other settings and other texts are refused."""
    known, texts = {}, _texts(prompts)
    for record in read_lines(recording.path, needs=("key", "id", "found")):
        if record["key"] != recording.key:
            raise ConfigError(
                f"--out: {recording.path} was made with another profile, drafter or --max-tokens; delete it first"
            )
        if record.get("text") != texts.get(record["id"], record.get("text")):
            raise ConfigError(
                f"--out: {recording.path} was made with another text of prompt {record['id']!r}; delete it first"
            )
        known[str(record["id"])] = [Mismatch(*found) for found in record["found"]]
    return known
