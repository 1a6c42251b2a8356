"""Check that speculation changes nothing: ids of the engine against transformers' greedy `generate`, float32.

Runs every combination of drafter, K and batch size on the same prompts, in process (colocated) or through Serve
deployments of their own (separate), and reports each output that differs, and how many drafted tokens were accepted: a
combination in which none were would compare plain decoding with itself. Exit status 1 for either. With the verifier
`via` a slim verifier reads every draft first and leaves each decision to the target; the rules other than strict are
lossy ones at the limits where they may keep nothing: ASD without a budget (B0), exceptions (M0) or gate (g0), CSD that
nominates no pair (lambda-inf) or passes none (tau2).
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeAlias

import yaml
from tqdm import tqdm

from jobs.options import add_prompt_options, prompts_from
from jobs.reference import StockGenerate
from serving.build import build
from serving.build_via import mask_of
from serving.config import (
    Eagle3Drafter,
    EngineConfig,
    FullVerifier,
    ModelConfig,
    ModelDrafter,
    Profile,
    SuffixDrafter,
    ViaVerifier,
    pinned,
)
from serving.config_rules import AsdRule, CsdRule, StrictRule
from serving.decode.offline import complete
from serving.errors import ConfigError, DrafthouseError
from serving.models.embedded import EMBEDDED_MODEL
from serving.models.tokenizer import ChatTokenizer
from serving.requests import GenerationRequest, Limits

SUMMARY = "check that ids equal transformers' greedy generate, over drafters, K and batch sizes"
_PORT = 8765
_MAX_DRAFT = 20
_NEVER = 2.0  # a threshold that no token reaches
_RULES: dict[str, StrictRule | AsdRule | CsdRule] = {
    "strict": StrictRule(),
    "B0": AsdRule(budget=0.0),
    "M0": AsdRule(budget=0.0, max_exceptions=0),
    "g0": AsdRule(gate=0.0),
    "lambda-inf": CsdRule(count_above=math.inf, min_ratio=0.0),
    "tau2": CsdRule(count_above=-1.0, min_ratio=2.0),
}


@dataclass
class Output:
    """Ids of one prompt, and how many of them were accepted drafts."""

    ids: list[int] = field(default_factory=list)
    accepted: int = 0


Run: TypeAlias = Callable[[list[GenerationRequest]], dict[str, Output]]


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs identity", description=__doc__)
    p.add_argument("--target", default=EMBEDDED_MODEL, help="default: %(default)s")
    p.add_argument("--drafter", default="smollm2-135m-drafter", help="draft LM; default: %(default)s")
    p.add_argument("--eagle3", default="smollm2-135m-eagle3", help="EAGLE-3 head; default: %(default)s")
    p.add_argument("--drafters", default="suffix,model", help="of suffix, model, eagle3; default: %(default)s")
    p.add_argument("--verifiers", default="full", help="of full, via; default: %(default)s")
    p.add_argument("--mask", help=f"layers of `via`; default: {ViaVerifier().mask}")
    p.add_argument("--rules", default="strict", help=f"of {', '.join(_RULES)}; default: %(default)s")
    p.add_argument("--drafts", default="1,2,4,8", metavar="K,K", help="drafted tokens a round; default: %(default)s")
    p.add_argument("--batches", default="1,8", metavar="N,N", help="sequences at once; default: %(default)s")
    p.add_argument("--placements", default="colocated", help="colocated, separate or both, separated by a comma")
    p.add_argument("--json", type=Path, metavar="OUT.json")
    add_prompt_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Print one line a combination and a summary."""
    args = parser().parse_args(argv)
    profiles = [_checked(profile) for profile in _profiles(args)]
    tokenizer = ChatTokenizer.load(args.target)
    requests = [
        GenerationRequest(p.id, tokenizer.render_chat([{"role": "user", "content": p.text}]), _limits(args, tokenizer))
        for p in prompts_from(args)
    ]
    expected = _reference(args, requests, tokenizer.stop_ids)
    rows = []
    with _ray_if(any(profile.placement == "separate" for profile in profiles)):
        for profile in profiles:
            with _colocated(profile) if profile.placement == "colocated" else _separate(profile) as run:
                for k in _numbers(args.drafts, "--drafts"):
                    found = _outputs(run, requests, k)
                    rows.append(compared(profile.name, k, expected, found))
    failed = sum(bool(row["differing"]) or row["accepted"] == 0 for row in rows)
    if args.json:
        args.json.write_text(json.dumps({"command": " ".join(argv), "rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({"combinations": len(rows), "failed": failed}))
    return 1 if failed else 0


def compared(name: str, k: int, expected: dict[str, list[int]], found: dict[str, Output]) -> dict[str, Any]:
    """One row of the report; also printed."""
    differing = [prompt for prompt, ids in expected.items() if found[prompt].ids != ids]
    accepted = sum(output.accepted for output in found.values())
    same = f"{len(expected) - len(differing)}/{len(expected)} identical"
    verdict = same if accepted else f"{same}, but no draft was accepted: nothing was checked"
    print(f"{name:<28} K={k:<3} {accepted:>6} accepted  {verdict}", flush=True)
    return {"profile": name, "K": k, "prompts": len(expected), "accepted": accepted, "differing": differing}


def _profiles(args: argparse.Namespace) -> list[Profile]:
    """One a placement, verifier, rule, drafter and batch size, with the largest K; requests ask for smaller ones."""
    largest = max(_numbers(args.drafts, "--drafts"))
    if largest > _MAX_DRAFT:
        raise ConfigError(f"--drafts: must be at most {_MAX_DRAFT}, got {largest}")
    drafters: dict[str, SuffixDrafter | ModelDrafter | Eagle3Drafter] = {
        "suffix": SuffixDrafter(max_draft=largest),
        "model": ModelDrafter(model=args.drafter, max_draft=largest),
        "eagle3": Eagle3Drafter(model=args.eagle3, max_draft=largest),
    }
    verifiers: dict[str, FullVerifier | ViaVerifier] = {
        "full": FullVerifier(),
        "via": ViaVerifier(mask=args.mask or ViaVerifier().mask, theta_accept=_NEVER, theta_escalate=_NEVER),
    }
    chosen = _names(args.verifiers, tuple(verifiers), "--verifiers")
    if args.mask is not None and "via" not in chosen:
        raise ConfigError("--mask: is of the verifier `via`; drop it, or add `via` to --verifiers")
    return [
        Profile(
            name="-".join([placement, *_unusual(verifier, rule), kind, f"batch{batch}"]),
            target=ModelConfig(model=args.target, dtype="float32"),
            drafter=drafters[kind],
            verifier=verifiers[verifier],
            rule=_RULES[rule],
            allow_uncertified=verifier == "via",
            engine=EngineConfig(max_sessions=batch, max_length=4096, guard=False),
            placement="separate" if placement == "separate" else "colocated",
        )
        for placement in _names(args.placements, ("colocated", "separate"), "--placements")
        for verifier in chosen
        for rule in _names(args.rules, tuple(_RULES), "--rules")
        for kind in _names(args.drafters, tuple(drafters), "--drafters")
        for batch in _numbers(args.batches, "--batches")
    ]


def _checked(profile: Profile) -> Profile:
    """With the layers of its mask, if it has one. Raises ConfigError where they are not for the target."""
    here = pinned(profile)
    if isinstance(here.verifier, ViaVerifier):
        mask_of(here, here.verifier)
    return here


def _unusual(verifier: str, rule: str) -> list[str]:
    return [part for part in (verifier, rule) if part not in ("full", "strict")]


def _outputs(run: Run, requests: list[GenerationRequest], k: int) -> dict[str, Output]:
    """Ids by prompt. Each K has a salt of its own, so that none drafts from, or continues, what another one left."""
    renamed = [replace(r, request_id=f"{r.request_id}#{k}", max_draft=k, salt=f"K{k}") for r in requests]
    found = run(renamed)
    return {request.request_id: found[f"{request.request_id}#{k}"] for request in requests}


@contextmanager
def _colocated(profile: Profile) -> Iterator[Run]:
    """In this process."""
    built = build(profile)
    yield lambda requests: {
        done.request_id: Output(done.output_ids, done.receipt.accepted) for done in complete(built.scheduler, requests)
    }


@contextmanager
def _separate(profile: Profile) -> Iterator[Run]:
    """Through Serve: a Target and a Drafter of their own on the Ray that is connected."""
    from ray import serve

    from jobs.deploying import APP_NAME, args_for_this_ray, deployed, wait_until_up
    from serving.deploy.target_client import TargetClient

    async def one(client: TargetClient, request: GenerationRequest) -> Output:
        output = Output()
        async for chunk in client.generate(request):
            output.ids += chunk.ids
            output.accepted = chunk.receipt.accepted
        return output

    async def every(client: TargetClient, requests: list[GenerationRequest]) -> dict[str, Output]:
        found = await asyncio.gather(*(one(client, request) for request in requests))
        return {request.request_id: output for request, output in zip(requests, found, strict=True)}

    with NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(profile.model_dump(), file)
        file.flush()
        with deployed(args_for_this_ray(file.name)):
            state = wait_until_up(f"http://127.0.0.1:{_PORT}", say=lambda _: None, timeout_s=600)
            if state != "ready":
                raise DrafthouseError(f"{profile.name}: is {state}, so nothing would be drafted and nothing checked")
            client = TargetClient(serve.get_deployment_handle("Target", APP_NAME))
            yield lambda requests: asyncio.run(every(client, requests))


@contextmanager
def _ray_if(needed: bool) -> Iterator[None]:
    if not needed:
        yield
        return
    from cluster.connect import connected, start_serve

    with connected():
        start_serve("127.0.0.1", _PORT)
        yield


def _reference(
    args: argparse.Namespace, requests: list[GenerationRequest], stop_ids: frozenset[int]
) -> dict[str, list[int]]:
    stock = StockGenerate(args.target, "float32", stop_ids=stop_ids)
    expected = {}
    for request in tqdm(requests, desc="transformers generate", unit="prompt", file=sys.stderr):
        (expected[request.request_id],) = stock.run([request.prompt_ids], max_tokens=args.max_tokens)
    return expected


def _limits(args: argparse.Namespace, tokenizer: ChatTokenizer) -> Limits:
    return Limits(args.max_tokens, tokenizer.stop_ids)


def _names(text: str, known: Sequence[str], flag: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag}: {name!r} is unknown; choose of {', '.join(known)}")
    return names


def _numbers(text: str, flag: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag}: must be integers separated by commas, got {text!r}") from None
    if min(numbers) < 1:
        raise ConfigError(f"{flag}: must be at least 1, got {text!r}")
    return numbers
