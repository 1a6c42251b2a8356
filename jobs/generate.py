"""Answer the first turn of each prompt of a file offline, in this process, in batches; a JSON line each, in order.

Each line has id, prompt_ids, output_ids, text, finish_reason, receipt and exceptions; a prompt that cannot be answered
gets its `error` instead. A killed run goes on where it stopped when it is started again with the same flags; with
another --limit, --batch or --max-tokens, say, the same --out is refused.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from jobs.json_lines import read_lines
from jobs.options import add_profile_options, add_prompt_options, profile_from, prompts_from
from serving.build import Built, build
from serving.config import Profile, check_servable
from serving.decode.offline import Completion, complete
from serving.errors import ConfigError, RequestError
from serving.requests import GenerationRequest, Limits
from tuning.prompts import Prompt

SUMMARY = "answer a file of prompts offline, in batches, to a JSONL file"


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs generate", description=__doc__)
    p.add_argument("--profile", default="suffix", metavar="NAME|FILE", help="default: %(default)s")
    p.add_argument("--out", type=Path, required=True, metavar="F.jsonl")
    p.add_argument("--raw", action="store_true", help="the prompt as it is, without the model's chat template")
    add_prompt_options(p)
    add_profile_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Exit status 1 if any prompt could not be answered, be it in an earlier run."""
    args = parser().parse_args(argv)
    profile, prompts = profile_from(args, args.profile), prompts_from(args)
    check_servable(profile)
    settings = _settings(args, profile, prompts)
    done = _on_file(args.out, settings)
    if not [p.id for p in prompts[: len(done)]] == [record["id"] for record in done]:
        raise ConfigError(f"--out: {args.out} holds other prompts than {args.prompts}; choose another file")
    failed = sum("error" in record for record in done)
    left = prompts[len(done) :]
    new = answers(build(profile), left, raw=args.raw, max_tokens=args.max_tokens) if left else iter(())
    with _appending(args.out, settings) as out, _bar(len(prompts), len(done)) as bar:
        for record in new:
            _write(out, record)
            if "error" in record:
                failed += 1
                tqdm.write(f"generate: {record['id']}: {record['error']}", file=sys.stderr)
            bar.update(1)
    print(json.dumps({"out": str(args.out), "prompts": len(prompts), "failed": failed}))
    return 1 if failed else 0


def answers(built: Built, prompts: Sequence[Prompt], *, raw: bool, max_tokens: int) -> Iterator[dict[str, Any]]:
    """One record a prompt, in order; each as soon as it and all before it are finished."""
    ready: dict[str, dict[str, Any]] = {}
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        try:
            requests.append(_request(built, prompt, raw=raw, max_tokens=max_tokens))
        except RequestError as error:
            ready[prompt.id] = {"id": prompt.id, "error": str(error)}
    asked = {request.request_id: request for request in requests}
    finished = complete(built.scheduler, requests)
    for prompt in prompts:
        while prompt.id not in ready:
            completion = next(finished)
            ready[completion.request_id] = _record(asked[completion.request_id], completion)
        yield ready.pop(prompt.id)


def _request(built: Built, prompt: Prompt, *, raw: bool, max_tokens: int) -> GenerationRequest:
    tokenizer = built.tokenizer
    ids = tokenizer.encode(prompt.text) if raw else tokenizer.render_chat([{"role": "user", "content": prompt.text}])
    request = GenerationRequest(prompt.id, ids, Limits(max_tokens, tokenizer.stop_ids), continues_prompt=raw)
    built.limits.check(request)
    return request


def _record(request: GenerationRequest, completion: Completion) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "prompt_ids": request.prompt_ids.tolist(),
        "output_ids": completion.output_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "receipt": completion.receipt.shown,
        "exceptions": [asdict(exception) for exception in completion.exceptions],
    }


@dataclass(frozen=True)
class _Settings:
    """What the lines of an output file depend on; kept beside it so that a resumed file is of one piece."""

    profile: str
    prompts: str
    raw: bool
    max_tokens: int

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))


def _settings(args: argparse.Namespace, profile: Profile, prompts: Sequence[Prompt]) -> _Settings:
    digest = hashlib.sha256("\0".join(f"{p.id}\0{p.text}" for p in prompts).encode()).hexdigest()[:16]
    return _Settings(profile.model_dump_json(), digest, args.raw, args.max_tokens)


def _on_file(out: Path, settings: _Settings) -> list[dict[str, Any]]:
    """Records that are already in `out`. Raises ConfigError where others than `settings` made them."""
    if out.is_dir():
        raise ConfigError(f"--out: {out} is a folder; name a file")
    if not out.is_file() or not out.stat().st_size:
        return []
    beside = _beside(out)
    if not beside.is_file():
        raise ConfigError(
            f"--out: {out} cannot be gone on with, for {beside}, which says how it was made, is missing; "
            "choose another file or delete it"
        )
    if beside.read_text(encoding="utf-8") != settings.text:
        raise ConfigError(f"--out: {out} was made with other flags or prompts; choose another file or delete it")
    return read_lines(out, needs=("id",))


def _appending(out: Path, settings: _Settings) -> TextIO:
    """`out`, open at its end, with `settings` beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _beside(out).write_text(settings.text, encoding="utf-8")
    return out.open("a", encoding="utf-8")


def _beside(out: Path) -> Path:
    return out.with_name(out.name + ".settings")


def _write(out: TextIO, record: dict[str, Any]) -> None:
    out.write(json.dumps(record, ensure_ascii=False) + "\n")
    out.flush()


def _bar(total: int, done: int) -> "tqdm[None]":
    return tqdm(total=total, initial=done, desc="generate", unit="prompt", file=sys.stderr, dynamic_ncols=True)
