"""Serve a profile over HTTP, on a Ray of this machine's own or on an existing cluster."""

import argparse
import time
from collections.abc import Sequence

from cluster.connect import connected, start_serve
from jobs.deploying import args_for_this_ray, check_asked, deployed, wait_until_up
from serving.app import AppArgs

SUMMARY = "serve a profile over HTTP (OpenAI's API) until Ctrl-C"


def main(argv: Sequence[str]) -> int:
    """Deploy, wait until ready, then stay. Exit status 0 on Ctrl-C."""
    args = _parser().parse_args(argv)
    asked = {"api_keys_env": args.api_keys_env}
    check_asked(AppArgs(profile=args.profile).model_copy(update=asked), args.port)
    url = f"http://{'127.0.0.1' if args.host == '0.0.0.0' else args.host}:{args.port}"
    with connected(args.address, num_cpus=args.num_cpus):
        start_serve(args.host, args.port)
        sizes = args_for_this_ray(args.profile).model_copy(update=asked)
        with deployed(sizes):
            state = wait_until_up(url, say=_say, timeout_s=args.wait_s)
            _say(f"{state}: {url}/v1 (Ctrl-C ends it)")
            _stay()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jobs serve", description=__doc__)
    parser.add_argument("--profile", default="suffix", metavar="NAME|FILE", help="default: %(default)s")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s; 0.0.0.0 for all interfaces")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--address", help="join the Ray cluster there (default: RAY_ADDRESS, else a local Ray)")
    parser.add_argument("--num-cpus", type=int, help="CPUs of a local Ray (default: all)")
    parser.add_argument("--api-keys-env", metavar="NAME", help="environment variable with the API keys")
    parser.add_argument("--wait-s", type=float, default=900.0, help="give up after so long; default: %(default)s")
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


def _stay() -> None:
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        _say("stopping")
