"""Run a profile on prompts and keep what happened in each round: Parquet traces, one row a round.

`train-yield` learns from them. With --every-position no draft token is kept, so each position of the same text gets a
draft: that is how to learn what a drafter yields everywhere. With --workers the parts are spread over so many Ray
workers, each with an engine and a CPU (and a GPU where there are any) of its own, which must all see the folder. A
killed run goes on with the parts that are missing.
"""

import argparse
import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jobs.options import add_profile_options, add_prompt_options, check_least, profile_from, prompts_from
from serving.build import Built, build, scheduler_limits
from serving.build_rules import models_identity
from serving.config import Profile
from serving.errors import ConfigError, DrafthouseError
from serving.models.tokenizer import ChatTokenizer
from serving.requests import GenerationRequest, Limits
from serving.trace import write_steps
from tuning.prompts import Prompt
from tuning.traces import TracingBook, capture

SUMMARY = "run a profile on prompts and write Parquet traces, one row a round"


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs capture", description=__doc__)
    p.add_argument("--profile", default="suffix", metavar="NAME|FILE", help="default: %(default)s")
    p.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    p.add_argument("--part-size", type=int, default=32, metavar="N", help="prompts in one file; default: %(default)s")
    p.add_argument("--every-position", action="store_true", help="keep no draft token: a draft for every position")
    p.add_argument("--workers", type=int, default=0, metavar="N", help="Ray workers; default: this process")
    p.add_argument("--address", help="of a Ray cluster; default: RAY_ADDRESS, or one of this machine's own")
    add_prompt_options(p)
    add_profile_options(p)
    return p


@dataclass(frozen=True)
class Capture:
    """What every part is made by. Travels to workers."""

    profile: Profile
    out: Path
    max_tokens: int
    every_position: bool

    @property
    def settings(self) -> dict[str, Any]:
        """What the files in `out` depend on besides their prompts."""
        return {"profile": self.profile.model_dump(), "max_tokens": self.max_tokens, "every": self.every_position}

    def requests(self, part: "Part", tokenizer: ChatTokenizer) -> list[GenerationRequest]:
        """One a prompt. Raises RequestError for a prompt that can never fit."""
        checked, limits = scheduler_limits(self.profile), Limits(self.max_tokens, tokenizer.stop_ids)
        requests = []
        for prompt in part.prompts:
            ids = tokenizer.render_chat([{"role": "user", "content": prompt.text}])
            requests.append(GenerationRequest(prompt.id, ids, limits))
            checked.check(requests[-1])
        return requests


@dataclass(frozen=True)
class Part:
    """The prompts of one file."""

    number: int
    prompts: tuple[Prompt, ...]

    def path(self, out: Path) -> Path:
        return out / f"part-{self.number:05d}.parquet"


class Capturer:
    """One engine that works off parts."""

    def __init__(self, job: Capture) -> None:
        self._job = job

    @cached_property
    def _book(self) -> TracingBook:
        return TracingBook(every_position=self._job.every_position)

    @cached_property
    def _built(self) -> Built:
        return build(self._job.profile, rules=self._book)

    def run(self, part: Part) -> int:
        """Write the part's file; returns its number of prompts."""
        requests = self._job.requests(part, self._built.tokenizer)
        steps = capture(self._built, self._book, part.prompts, requests)
        write_steps(part.path(self._job.out), (step for of_one in steps for step in of_one))
        return len(part.prompts)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """For Ray Data: column `part` of JSON parts to columns `done` and `error`, what a user is meant to read."""
        outcomes = [self._outcome(_part_from(text)) for text in batch["part"]]
        return {"done": [done for done, _ in outcomes], "error": [error for _, error in outcomes]}

    def _outcome(self, part: Part) -> tuple[int, str]:
        try:
            return self.run(part), ""
        except DrafthouseError as error:
            return 0, str(error)


def main(argv: Sequence[str]) -> int:
    """Print where the traces are."""
    args = parser().parse_args(argv)
    check_least(args, {"part_size": 1, "workers": 0})
    profile, prompts = profile_from(args, args.profile), prompts_from(args)
    if not profile.is_lossless:
        raise ConfigError(f"--profile: {args.profile!r} is lossy; traces of its strict twin are what replays need")
    if args.every_position:  # a guard would see drafts that are never accepted, and stop asking for them
        engine = profile.engine.model_copy(update={"guard": False})
        profile = profile.model_copy(update={"engine": engine})
    job = Capture(profile, args.out.absolute(), args.max_tokens, args.every_position)
    size = args.part_size
    parts = [Part(i // size, tuple(prompts[i : i + size])) for i in range(0, len(prompts), size)]
    _check_folder(job, parts)
    missing = [part for part in parts if not part.path(job.out).is_file()]
    done = sum(len(part.prompts) for part in parts if part not in missing)
    tokenizer = ChatTokenizer.load(profile.target.model)
    for part in missing:  # before a model is loaded
        job.requests(part, tokenizer)
    with tqdm(total=len(prompts), initial=done, desc="capture", unit="prompt", file=sys.stderr) as bar:
        for count in _on_ray(job, missing, args) if args.workers and missing else map(Capturer(job).run, missing):
            bar.update(count)
    print(json.dumps({"out": str(args.out), "prompts": len(prompts), "parts": len(parts)}))
    return 0


def _on_ray(job: Capture, parts: Sequence[Part], args: argparse.Namespace) -> Iterator[int]:
    """The number of prompts of each part that is done, as they get done."""
    import ray.data

    from cluster.connect import connected

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    with connected(args.address):
        rows = ray.data.from_items([{"part": _part_text(part)} for part in parts], override_num_blocks=len(parts))
        done = rows.map_batches(
            Capturer,
            fn_constructor_args=(job,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(args.workers, len(parts))),
            num_cpus=1,
            num_gpus=min(1, ray.cluster_resources().get("GPU", 0)) or None,
        )
        for row in done.iter_rows():
            if row["error"]:
                raise DrafthouseError(row["error"])
            yield int(row["done"])


def _part_text(part: Part) -> str:
    return json.dumps({"number": part.number, "prompts": [one.model_dump(mode="json") for one in part.prompts]})


def _part_from(text: str) -> Part:
    found = json.loads(text)
    return Part(found["number"], tuple(Prompt.model_validate(one) for one in found["prompts"]))


def _check_folder(job: Capture, parts: Sequence[Part]) -> None:
    """Make the folder, or see that what is in it belongs to the same run."""
    job.out.mkdir(parents=True, exist_ok=True)
    beside = job.out / "capture.json"
    prompts = [[[prompt.id, prompt.text] for prompt in part.prompts] for part in parts]
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    about = {**job.settings, "prompts": [[p.id for p in part.prompts] for part in parts], "prompts_digest": digest}
    text = json.dumps(about | {"models": models_identity(job.profile)}, indent=1)
    if beside.is_file() and beside.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"--out: {job.out} was made with other flags, prompts or weights; choose another folder or delete it"
        )
    beside.write_text(text, encoding="utf-8")
