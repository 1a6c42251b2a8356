"""From nothing to one streamed answer: local Ray, separate actors, the embedded model."""

import argparse
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from cluster.connect import connected, start_serve
from jobs.deploying import args_for_this_ray, check_asked, deployed, wait_until_up
from serving.app import AppArgs
from serving.config import load_profile
from serving.errors import DrafthouseError
from serving.models.embedded import EMBEDDED_MODEL, ensure_embedded_model

SUMMARY = "local Ray, the embedded model, one streamed chat answer with its receipt"
PROFILE = "suffix"
PROMPT = (
    "Here is a recipe. Write it again for four people instead of two.\n\n"
    "Pancakes for two: 100 g flour, 150 ml milk, 1 egg, a pinch of salt. Mix the flour, the milk, the egg and the "
    "salt. Heat some butter in a pan. Pour in a ladle of batter and fry it on both sides until it is golden."
)
MAX_TOKENS = 200
_WAIT_S = 600.0


def main(argv: Sequence[str]) -> int:
    """With --once exit status 0 after the answer, else serve until Ctrl-C."""
    args = _parser().parse_args(argv)
    check_asked(AppArgs(profile=args.profile), args.port)
    started_s = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {line}", flush=True)

    say(f"model {EMBEDDED_MODEL}")
    ensure_embedded_model()
    say("starting Ray")
    with connected(num_cpus=args.num_cpus):
        start_serve("127.0.0.1", args.port)
        say(f"deploying profile {args.profile}: Gateway, Target and Drafter")
        with deployed(args_for_this_ray(args.profile)):
            url = f"http://127.0.0.1:{args.port}"
            say(f"{wait_until_up(url, say=say, timeout_s=_WAIT_S)}: {url}/v1")
            body = request_body(args.profile)
            _show_answer(url, body)
            if not args.once:
                _stay(url, body)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jobs demo", description=__doc__)
    parser.add_argument("--once", action="store_true", help="end after the answer")
    parser.add_argument("--profile", default=PROFILE, metavar="NAME|FILE", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--num-cpus", type=int, help="CPUs of the local Ray (default: all)")
    return parser


def _show_answer(url: str, body: dict[str, object]) -> None:
    answer = Answer()
    print(f"\nuser: {PROMPT}\nassistant: ", end="", flush=True)
    for piece in stream(url, body, answer):
        print(piece, end="", flush=True)
    print(f"\n\n{receipt_table(answer)}", flush=True)


@dataclass
class Answer:
    """One streamed answer as it comes in; times in seconds from the request."""

    num_chunks: int = 0
    finish_reason: str = ""
    first_s: float = 0.0
    last_s: float = 0.0
    receipt: dict[str, object] = field(default_factory=dict)


def request_body(profile_name: str) -> dict[str, object]:
    """The demonstration's request, as any OpenAI client would send it."""
    return {
        "model": load_profile(profile_name).name,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "stream": True,
    }


def stream(url: str, body: dict[str, object], answer: Answer) -> Iterator[str]:
    """The text piece by piece; fills `answer` on the way. Raises DrafthouseError for anything but 200."""
    try:
        yield from _events(url, body, answer)
    except httpx.HTTPError as error:
        raise DrafthouseError(f"the request failed: {type(error).__name__}; see the messages above") from None


def _events(url: str, body: dict[str, object], answer: Answer) -> Iterator[str]:
    started_s = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120.0) as response:
        if response.status_code != 200:
            raise DrafthouseError(f"the request failed: {response.status_code} {response.read().decode()[:300]}")
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise DrafthouseError(f"the answer broke off: {event['error']}")
            answer.receipt = event.get("speculation") or answer.receipt
            for choice in event["choices"]:
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                if text := choice["delta"].get("content"):
                    answer.last_s = time.perf_counter() - started_s
                    answer.first_s = answer.first_s or answer.last_s
                    answer.num_chunks += 1
                    yield text


def receipt_table(answer: Answer) -> str:
    """The receipt, a line a figure, with the speed as the client saw it."""
    emitted = answer.receipt.get("emitted", 0)
    seconds = answer.last_s - answer.first_s
    rows = {
        "finish reason": answer.finish_reason,
        "first token": f"{answer.first_s * 1000:.0f} ms",
        "speed after it": f"{(int(str(emitted)) - 1) / seconds:.1f} tokens/s" if seconds > 0 else "-",
        **{name.replace("_", " "): _shown(value) for name, value in answer.receipt.items()},
    }
    return "\n".join(["receipt", *(f"  {name:17}{value}" for name, value in rows.items())])


def _shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.2f}"
        case _:
            return str(value)


def _stay(url: str, body: dict[str, object]) -> None:
    print(f"\nserving at {url}/v1 until Ctrl-C; try:\n")
    print(
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}\n",
        flush=True,
    )
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        print("stopping", flush=True)
