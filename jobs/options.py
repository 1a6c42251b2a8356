"""Flags that several verbs share: which profile, with what in place of its own parts, on which prompts."""

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from serving.config import HybridDrafter, ModelDrafter, Profile, load_profile
from serving.config_rules import CsdControls
from serving.errors import ConfigError, ModelError, one_line
from serving.models.source import resolve_model
from tuning.prompts import Prompt, read_prompts, select

_FLAGS: dict[str | int, str] = {"max_sessions": "--batch", "max_length": "--max-length", "max_draft": "--max-draft"}
_OFFLINE_MEMORY = "offline, `memory: online` begins empty and ends with the run; its store is neither read nor written"


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    """--target, --drafter, --dtype, --batch, --max-draft, --max-length: what replaces a profile's own values."""
    group = parser.add_argument_group("in place of the profile's own values", description=f"{_OFFLINE_MEMORY}.")
    group.add_argument("--target", metavar="MODEL", help="embedded name, Hub id, folder or GGUF file")
    group.add_argument("--drafter", metavar="MODEL", help="draft LM of a profile whose drafter is a model")
    group.add_argument("--dtype", choices=("float32", "bfloat16"))
    group.add_argument("--batch", type=int, metavar="N", help="sequences at once")
    group.add_argument("--max-draft", type=int, metavar="K", help="drafted tokens a round")
    group.add_argument("--max-length", type=int, metavar="N", help="prompt and new tokens of one sequence")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """--prompts, --tasks, --limit, --max-tokens."""
    parser.add_argument("--prompts", type=Path, required=True, metavar="F", help="JSONL or Parquet: id, task, turns")
    parser.add_argument("--tasks", default="", metavar="A,B", help="only prompts of these tasks")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N prompts, tasks taking turns")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default: %(default)s")


def profile_from(args: argparse.Namespace, name: str) -> Profile:
    """The profile `name` with the values of the flags; stderr says what of it a run offline lacks.

    Raises ConfigError naming the flag.
    """
    profile = load_profile(name)
    _check_models(target=args.target, drafter=args.drafter)
    if isinstance(profile.rule, CsdControls) and profile.rule.memory == "online":
        print(f"profile {profile.name!r}: {_OFFLINE_MEMORY}", file=sys.stderr)
    values: dict[str, Any] = profile.model_dump()
    values["target"].update(_given(model=args.target, dtype=args.dtype))
    values["engine"].update(_given(max_sessions=args.batch, max_length=args.max_length))
    if args.max_draft is not None and profile.drafter.kind == "none" and not _is_one_of_many(args):
        raise ConfigError(f"--max-draft: profile {name!r} drafts nothing; drop the flag or choose another profile")
    if args.drafter and not isinstance(profile.drafter, ModelDrafter | HybridDrafter) and not _is_one_of_many(args):
        raise ConfigError(f"--drafter: profile {name!r} has no draft model; drop the flag, or use `--profile strict`")
    for arm in _arms(profile, values["drafter"]):
        arm.update(_given(max_draft=args.max_draft))
        if args.drafter and arm["kind"] == "model":
            arm["model"] = args.drafter
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        flags = [_FLAGS[field] for field in error.errors()[0]["loc"] if field in _FLAGS]
        given = flags[0] if flags else f"profile {name} with these flags"
        raise ConfigError(f"{given}: {one_line(error)}") from None


def check_least(args: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raise ConfigError, naming the flag, where one that was given is below its bound or not finite."""
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and not bound <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {bound}, got {value:g}")


def prompts_from(args: argparse.Namespace) -> list[Prompt]:
    """The prompts that the flags choose."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit: must be at least 1, got {args.limit}")
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens: must be at least 1, got {args.max_tokens}")
    tasks = [task for task in args.tasks.split(",") if task]
    return select(read_prompts(args.prompts), tasks=tasks, limit=args.limit)


def _check_models(**given: str | None) -> None:
    """Raise ConfigError naming the flag where what it gives can be no model: loading would say so much later."""
    for flag, model in given.items():
        try:
            if model is not None:
                resolve_model(model)
        except ModelError as error:
            raise ConfigError(f"--{flag}: {str(error).removeprefix('model: ')}") from None


def _arms(profile: Profile, drafter: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a drafter that draft."""
    if profile.drafter.kind == "none":
        return []
    return [drafter["cache"], drafter["model"]] if isinstance(profile.drafter, HybridDrafter) else [drafter]


def _is_one_of_many(args: argparse.Namespace) -> bool:
    """Whether several profiles are asked for, of which a flag may suit only some."""
    return "," in (getattr(args, "profiles", None) or "")


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
