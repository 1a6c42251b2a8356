"""Check that speculation changes nothing: ids of the engine against transformers' greedy `generate`, float32.

Runs every combination of drafter, K and batch size on the same prompts, in process (colocated) or through Serve
deployments of their own (separate), and reports each output that differs. Exit status 1 if any does.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import yaml
from tqdm import tqdm

from jobs.options import add_prompt_options, prompts_from
from jobs.reference import StockGenerate
from serving.build import build
from serving.config import EngineConfig, ModelConfig, ModelDrafter, Profile, SuffixDrafter
from serving.decode.offline import complete
from serving.errors import ConfigError
from serving.models.embedded import EMBEDDED_MODEL
from serving.models.tokenizer import ChatTokenizer
from serving.types import GenerationRequest, Limits

SUMMARY = "check that ids equal transformers' greedy generate, over drafters, K and batch sizes"
DRAFTERS = ("suffix", "model")
_PORT = 8765


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(prog="python -m jobs identity", description=__doc__)
    p.add_argument("--target", default=EMBEDDED_MODEL, help="default: %(default)s")
    p.add_argument("--drafter", default="smollm2-135m-drafter", help="draft LM; default: %(default)s")
    p.add_argument("--drafters", default="suffix,model", help="default: %(default)s")
    p.add_argument("--drafts", default="1,2,4,8", metavar="K,K", help="drafted tokens a round; default: %(default)s")
    p.add_argument("--batches", default="1,8", metavar="N,N", help="sequences at once; default: %(default)s")
    p.add_argument("--placements", default="colocated", help="colocated, separate or both, separated by a comma")
    p.add_argument("--json", type=Path, metavar="OUT.json")
    add_prompt_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Print one line a combination and a summary."""
    args = parser().parse_args(argv)
    tokenizer = ChatTokenizer.load(args.target)
    requests = [
        GenerationRequest(p.id, tokenizer.render_chat([{"role": "user", "content": p.text}]), _limits(args, tokenizer))
        for p in prompts_from(args)
    ]
    expected = _reference(args, requests, tokenizer.stop_ids)
    profiles, rows = _profiles(args), []
    with _ray_if(any(profile.placement == "separate" for profile in profiles)):
        for profile in profiles:
            found = _colocated(profile, requests) if profile.placement == "colocated" else _separate(profile, requests)
            differing = [name for name, ids in expected.items() if found.get(name) != ids]
            rows.append({"profile": profile.name, "prompts": len(expected), "differing": differing})
            print(f"{profile.name:<40} {len(expected) - len(differing)}/{len(expected)} identical", flush=True)
    failed = sum(bool(row["differing"]) for row in rows)
    if args.json:
        args.json.write_text(json.dumps({"command": " ".join(argv), "rows": rows}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({"combinations": len(rows), "with_differences": failed}))
    return 1 if failed else 0


def _profiles(args: argparse.Namespace) -> list[Profile]:
    profiles = []
    for placement in _names(args.placements, ("colocated", "separate"), "--placements"):
        for kind in _names(args.drafters, DRAFTERS, "--drafters"):
            for k in _numbers(args.drafts, "--drafts"):
                for batch in _numbers(args.batches, "--batches"):
                    drafter = (
                        SuffixDrafter(max_draft=k)
                        if kind == "suffix"
                        else ModelDrafter(model=args.drafter, max_draft=k)
                    )
                    profile = Profile(
                        name=f"{placement}-{kind}-K{k}-batch{batch}",
                        target=ModelConfig(model=args.target, dtype="float32"),
                        drafter=drafter,
                        engine=EngineConfig(max_sessions=batch, max_length=4096),
                    )
                    profiles.append(profile.model_copy(update={"placement": placement}))
    return profiles


def _colocated(profile: Profile, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    return {done.request_id: done.output_ids for done in complete(build(profile).scheduler, requests)}


def _separate(profile: Profile, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    """The same through Serve: a Target and a Drafter of their own on the Ray that is connected."""
    from ray import serve

    from jobs.deploying import APP_NAME, args_for_this_ray, deployed, wait_until_up
    from serving.deploy.target_client import TargetClient

    async def one(client: TargetClient, request: GenerationRequest) -> list[int]:
        return [token async for chunk in client.generate(request) for token in chunk.ids]

    async def every(client: TargetClient) -> dict[str, list[int]]:
        found = await asyncio.gather(*(one(client, request) for request in requests))
        return {request.request_id: ids for request, ids in zip(requests, found, strict=True)}

    with NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(profile.model_dump(), file)
        file.flush()
        with deployed(args_for_this_ray(file.name)):
            wait_until_up(f"http://127.0.0.1:{_PORT}", say=lambda _: None, timeout_s=600)
            return asyncio.run(every(TargetClient(serve.get_deployment_handle("Target", APP_NAME))))


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
