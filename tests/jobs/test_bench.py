"""`python -m jobs bench`: its flags, and --serve from the command line to the report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs.__main__ import main
from jobs.bench import parser
from jobs.figures import Timing
from jobs.levels import Turn, turn_of
from jobs.load import LevelRun, Sample, connected
from jobs.paired import plan_from
from jobs.served import Plan, _in_turns, turns_of
from jobs.served import plan_from as served_plan_from
from serving.errors import ConfigError, OverloadedError
from tests.api.scripted import ScriptedBackend, create_app
from tests.jobs.http_server import RawEvents, chat_request, served
from tests.models.toy import save_toy
from tuning.prompts import Prompt

PROMPTS = [Prompt(id="a", turns=("hi",)), Prompt(id="b", turns=("ho",)), Prompt(id="c", turns=("he",))]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """What every call needs."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(prompt.model_dump_json() for prompt in PROMPTS))
    return ["bench", "--prompts", str(prompts), "--max-tokens", "16", "--json", str(tmp_path / "out" / "r.json")]


def written(flags: list[str]) -> Any:
    return json.loads(Path(flags[-1]).read_text())


def last_line(capsys) -> str:
    """The error, which must be all there is."""
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


def arguments(*flags: str) -> Any:
    args = parser().parse_args(["--prompts", "p", "--json", "j", *flags])
    args.batch = args.batch or 1
    return args


def test_a_running_application_is_measured_level_by_level(flags: list[str], capsys) -> None:
    with served(create_app(ScriptedBackend())) as url:
        assert main(["bench", "--serve", url, "--concurrency", "1,3", *flags[1:]]) == 0
    report = written(flags)
    assert [(level["concurrency"], level["requests"], level["errors"]) for level in report["levels"]] == [
        (1, 8, 0),
        (3, 12, 0),
    ]
    assert report["meta"]["model"] == "tiny-chat"
    for level in report["levels"]:
        assert level["accepted_length"] == 1.0
        assert level["ttft_ms"]["p50"] <= level["ttft_ms"]["p95"]
        assert len(level["raw"]) == level["requests"]
    assert Path(flags[-1]).with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.startswith("concurrency  requests  tokens/s")


def test_failed_requests_are_counted_told_and_the_exit_status(flags: list[str], capsys) -> None:
    with served(create_app(ScriptedBackend(script=[OverloadedError("full")]))) as url:
        assert main(["bench", "--serve", url, "--concurrency", "1", "--requests", "2", *flags[1:]]) == 1
    (level,) = written(flags)["levels"]
    assert (level["errors"], level["tokens_per_s"], level["tpot_ms"]) == (2, 0.0, None)
    assert "bench: 2 of 2 requests failed; the first: HTTP 429: The server has no room" in capsys.readouterr().err


def test_an_api_key_comes_from_the_environment(flags: list[str], capsys, monkeypatch) -> None:
    call = ["--concurrency", "1", "--requests", "1", *flags[1:]]
    with served(create_app(ScriptedBackend(), api_keys=frozenset({"secret"}))) as url:
        assert main(["bench", "--serve", url, *call]) == 2
        assert last_line(capsys).startswith("bench: --api-key-env: http://127.0.0.1:")
        assert main(["bench", "--serve", url, "--api-key-env", "NO_SUCH_KEY", *call]) == 2
        assert last_line(capsys) == "bench: --api-key-env: the environment variable NO_SUCH_KEY is not set"
        monkeypatch.setenv("BENCH_KEY", "secret")
        assert main(["bench", "--serve", url, "--api-key-env", "BENCH_KEY", *call]) == 0
    assert "secret" not in Path(flags[-1]).read_text()


def test_nobody_there_is_one_line(flags: list[str], capsys) -> None:
    with served(RawEvents([])) as url:
        pass
    assert main(["bench", "--serve", url, *flags[1:]]) == 1
    assert last_line(capsys).startswith(f"bench: --serve: {url} cannot be reached: ")


def test_something_else_there_is_one_line(flags: list[str], capsys) -> None:
    async def nothing(scope, receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body"})

    with served(nothing) as url:
        assert main(["bench", "--serve", url, *flags[1:]]) == 1
    assert last_line(capsys).endswith("answers /v1/models with status 404 and no list of models")


def test_the_way_is_priced_in_turns_with_the_engine_of_a_profile(flags: list[str], tmp_path: Path, one_thread) -> None:
    profile = tmp_path / "toy.yaml"
    target = save_toy(tmp_path / "toy")
    profile.write_text(f"name: tiny-suffix\ntarget: {{model: {target}, dtype: float32}}\nengine: {{max_length: 64}}\n")
    with served(create_app(ScriptedBackend())) as url:
        call = ["--concurrency", "2,4", "--requests", "7", "--beside", str(profile), "--threads", "1", *flags[1:]]
        assert main(["bench", "--serve", url, *call]) == 0
    for level in written(flags)["levels"]:
        assert level["requests"] == len(level["raw"]) == 7
        assert len(level["turns"]) <= 1  # a scripted answer may come all at once, which has no price
        assert all(turn["engine_ms"] > 0.0 < turn["http_ms"] for turn in level["turns"])
        assert (level["hop_cost"] is None) == (level["turns"] == [])
    assert written(flags)["meta"]["beside"] == str(profile)


def test_an_application_of_another_profile_is_not_priced(flags: list[str], capsys) -> None:
    with served(create_app(ScriptedBackend())) as url:
        assert main(["bench", "--serve", url, "--beside", "plain", *flags[1:]]) == 2
    said = f"--beside: {url} does not serve the profile 'plain' (it has tiny-chat, tiny-suffix)"
    assert said in last_line(capsys)


async def test_turns_begin_with_either_side() -> None:
    turns = list[tuple[range, int]]()

    def engine(numbers: Sequence[int], concurrency: int) -> list[float | None]:
        turns.append((range(numbers[0], numbers[-1] + 1), len(backend.requests)))
        return [1e-9]

    backend = ScriptedBackend()
    with served(create_app(backend)) as url:
        async with connected(url, None) as client:
            level = await _in_turns(client, [chat_request(f"p{i}") for i in range(25)], 2, lambda: None, engine)
    assert turns == [(range(8), 8), (range(8, 16), 8), (range(16, 25), 25)]  # the second begins with the engine
    assert level.requests == 25


@pytest.mark.parametrize(
    ("ended_s", "engine_ms", "turn"),
    [
        ((1.1, 1.3), (50.0, None, 60.0), Turn(200.0, 55.0)),
        ((1.1, 1.3), (None,), None),
        ((1.0, 1.0), (50.0,), None),  # all at once
    ],
)
def test_a_turn_has_a_price_where_both_sides_took_time(ended_s, engine_ms, turn) -> None:
    samples = [Sample(str(end), Timing(2, 1.0, end)) for end in ended_s]
    failed = Sample("failed", Timing(2, 1.0, 9.0), error="refused")
    assert turn_of(LevelRun(2, 1.0, [*samples, failed]), engine_ms) == turn


@pytest.mark.parametrize(
    ("num_requests", "concurrency", "sizes"), [(8, 1, [4, 4]), (7, 8, [7]), (64, 16, [64]), (70, 8, [35, 35])]
)
def test_turns_have_room_for_streams_that_begin_when_others_end(num_requests, concurrency, sizes) -> None:
    assert [len(numbers) for numbers in turns_of(num_requests, concurrency)] == sizes


@pytest.mark.parametrize(("flag", "max_draft"), [(None, None), ("off", 0), ("3", 3)])
def test_what_bounds_drafts_over_http_bounds_the_engine_beside(flag: str | None, max_draft: int | None) -> None:
    more = [] if flag is None else ["--speculation", flag]
    assert served_plan_from(arguments("--serve", "http://x", *more)).max_draft == max_draft


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--serve", "http://x", "--batch", "4"], "--batch: has no effect on a running application"),
        (["--serve", "http://x", "--profiles", "plain"], "--profiles: has no effect on a running application"),
        (["--serve", "http://x", "--hybrid", "hybrid"], "--hybrid: has no effect on a running application"),
        (["--hybrid", "suffix"], "--hybrid: 'suffix' must draft by kind hybrid with a chooser of kind yield"),
        (["--concurrency", "4"], "--concurrency: needs --serve URL"),
        (["--serve", "ftp://x"], "--serve: must start with http:// or https://, got 'ftp://x'"),
        (["--serve", "http://x", "--concurrency", "1,0"], "--concurrency: must be numbers from 1 up"),
        (["--serve", "http://x", "--requests", "4"], "--requests: must be at least the concurrency, got 4 for 16"),
        (["--serve", "http://x", "--speculation", "on"], "--speculation: must be off or a number of tokens, got 'on'"),
        (["--beside", "plain"], "--beside: needs --serve URL"),
        (["--serve", "http://x", "--threads", "1"], "--threads: has no effect on a running application"),
        (["--serve", "http://x", "--beside", "no-such"], "profile: 'no-such' is neither a shipped profile"),
        (["--temperature", "3"], "--temperature: must be between 0 and 2, got 3"),
        (["--repeats", "0"], "--repeats: must be at least 1, got 0"),
        (["--threads", "0"], "--threads: must be at least 1, got 0"),
        (["--stock", "fast"], "--stock: 'fast' is unknown; choose of generate, lookup, assisted"),
        (["--stock", "assisted"], "--assistant: `assisted` needs a causal LM where no profile drafts with a model"),
        (["--profiles", ","], "--profiles: name at least one"),
        (["--profiles", "plain,plain"], "--profiles, --stock: 'plain' appears 2 times; names must differ"),
        (["--batch", "2", "--stock", "lookup"], "--stock: transformers runs 'lookup' at batch 1 only"),
        (["--batch", "4"], "--batch: must be at most the number of prompts (3), got 4"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], extra: list[str], said: str, capsys) -> None:
    assert main(["bench", *extra, *flags[1:]]) == 2
    assert last_line(capsys).startswith(f"bench: {said}")


def test_a_report_that_cannot_be_written_is_told_before_the_work(flags: list[str], tmp_path: Path, capsys) -> None:
    assert main([*flags[:-1], str(tmp_path)]) == 2
    assert last_line(capsys) == f"bench: --json: {tmp_path} cannot be written"


def test_stock_arms_that_run_at_this_batch_are_the_default() -> None:
    assert plan_from(arguments(), 3).stock == ["generate", "lookup"]
    assert plan_from(arguments("--batch", "2"), 3).stock == ["generate"]
    assert plan_from(arguments("--stock", ""), 3).stock == []


def test_the_assistant_is_named_or_a_profiles_own() -> None:
    assisted = ("--stock", "assisted", "--profiles", "plain,strict")
    assert plan_from(arguments(*assisted), 3).assistant == "smollm2-135m-drafter"
    assert plan_from(arguments(*assisted, "--assistant", "mine"), 3).assistant == "mine"


def test_profiles_of_different_targets_are_not_compared(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("name: other\ntarget: {model: smollm2-135m-instruct, dtype: float32}\n")
    with pytest.raises(ConfigError, match=r"--profiles: must share one target, got .* set --target and --dtype"):
        plan_from(arguments("--profiles", f"plain,{other}"), 3)
    assert len(plan_from(arguments("--profiles", f"plain,{other}", "--dtype", "float32"), 3).profiles) == 2


def test_prompts_are_cycled_with_a_seed_each_and_a_salt_a_cycle() -> None:
    plan = served_plan_from(arguments("--serve", "http://x", "--concurrency", "1", "--seed", "7", "--speculation", "2"))
    bodies = [request.body for request in plan.bodies(PROMPTS, "m", 1)]
    assert [body["seed"] for body in bodies] == [7, 8, 9, 7, 8, 9, 7, 8]
    assert [body["messages"] for body in bodies[:4:3]] == [[{"role": "user", "content": "hi"}]] * 2
    salts = [body["cache_salt"] for body in bodies]
    assert [salts.index(salt) for salt in salts] == [0, 0, 0, 3, 3, 3, 6, 6]
    assert bodies[0]["speculation"] == {"max_draft": 2}
    assert salts[0] != plan.bodies(PROMPTS, "m", 1)[0].body["cache_salt"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], [8, 64]), (["--beside", "plain"], [16, 256]), (["--requests", "20"], [20, 20])],
)
def test_requests_of_a_level(flags: list[str], expected: list[int]) -> None:
    plan: Plan = served_plan_from(arguments("--serve", "http://x", *flags))
    assert [plan.requests_at(1), plan.requests_at(16)] == expected
