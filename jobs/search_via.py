"""Search for the layers that a slim verifier (VIA-SD) can do without, on the target's own chat answers.

Each arm searches each size with the same budget of questions, by DIMR cost on calibration answers; a question is one
mask on one block of --rows positions. `random`; the paper's `alternating` random and Bayesian search; `guided`
(sensitivities, TPE from their ranks, then swaps, where every fourth question judges a leader again on a further block);
for comparison masks at `even` distances and of the layers that do least harm `one at a time`. The finals are the same
for every arm: its best 24 on a quarter of --final-rows, the best 6 of these on the others too. The best of each arm is
judged on held-out answers, and `guided` compared with the others there, with 95 % intervals over prompts. No prompt
serves for two of this. The best of each size is timed: what a slim pass costs of a full one here, and what share of
the full passes it must save to pay. Killed, it goes on where it was when started again with the same flags.

Questions are judged in a Ray Tune trial, on --cpus and --gpus of the cluster (without --gpus on CPUs alone). Finals,
held-out answers and timings are this process's work, on the GPU that it sees, if any.

DIR gets evaluations.jsonl and finals.jsonl (every answer), mask-N.json (the best of each size, as profiles name it),
report.json and history.png.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from cluster.connect import connected
from cluster.resources import Bundle, all_nodes
from jobs.figures import table
from jobs.plotting import step_charts
from jobs.provenance import Provenance
from jobs.reports import check_folder, write_json
from jobs.training import in_order, texts_of
from jobs.via_options import add_via_options, check_via_options, plan_of
from jobs.via_rows import RowCounts, rows_of
from serving.config import ModelDrafter
from serving.errors import ConfigError
from serving.models.digest import model_digest
from serving.models.loading import read_config
from serving.models.source import resolve_model
from serving.models.tokenizer import ChatTokenizer
from tuning.dimr import ALPHA, BETA, Agreement, ByDialogue, mean
from tuning.mask_finals import Rung, difference, finals
from tuning.mask_log import History, MaskLog, MaskSearch, Plan
from tuning.mask_space import Mask, Question
from tuning.search import BenchRecipe, search_masks
from tuning.selfgen import Dialogue
from tuning.via import each_judged, load_target, mask_pass_times, measured_length
from tuning.via_cost import saving_verdict


def parser() -> argparse.ArgumentParser:
    """The flags of this job."""
    p = argparse.ArgumentParser(
        prog="python -m jobs search via", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_via_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Search, judge on held-out answers, write masks, report and plot."""
    args = parser().parse_args(argv)
    check_via_options(args)
    check_folder("--out", args.out)
    num_layers = read_config(args.target).get_text_config().num_hidden_layers
    plan, counts = plan_of(args, num_layers), RowCounts(args.rows, args.final_rows, args.held_out_rows)
    decode = ChatTokenizer.load(args.target).decode_raw
    rows = rows_of(in_order(args, texts_of(args, args.out / "text")), counts, decode=decode, seed=args.seed)
    log = MaskLog(args.out / "evaluations.jsonl", _identity(args, rows.blocks))
    finals_log = MaskLog(args.out / "finals.jsonl", _identity(args, rows.rungs))
    search = MaskSearch(plan, log)
    _search(args, plan, search, rows.blocks)
    histories = found_by(search.histories, plan.sizes, _why(args.out / "trials"))
    staying = _choose(args, finals_log, rows.rungs, counts.rungs, histories)
    histories = found_by(staying, plan.sizes, _why(args.out / "finals.jsonl"))
    held_out = _judge(args, rows.held_out, histories)
    histories = found_by(sound(histories, held_out), plan.sizes, "its cost on held-out answers is no number")
    provenance = asdict(Provenance.of("search via", argv))
    arms = [_row(history, mean(held_out[history.best])) for history in histories]
    compared = _compared(histories, held_out)
    best = {size: _best(row for row in arms if row["skipped layers"] == size) for size in plan.sizes}
    for size, row in best.items():
        write_json(args.out / f"mask-{size}.json", _mask(args, row, num_layers, provenance))
    costs = _costs(args, best, num_layers)
    report = {
        "provenance": provenance,
        "seconds": round(log.seconds, 1),
        "masks evaluated": log.num_evaluated,
        "masks per second": round(log.num_evaluated / log.seconds, 3) if log.seconds else None,
        "evaluations": sum(history.num_asked for history in search.histories),
        "rows": {**asdict(counts), "rungs": [asdict(rung) for rung in counts.rungs]},
        "prompts": {
            "blocks": [len(block) for block in rows.blocks],
            "rungs": [len(rung) for rung in rows.rungs],
            "held_out": len(rows.held_out),
        },
        "arms": arms,
        "guided less others, held out": compared,
        "costs": costs,
    }
    write_json(args.out / "report.json", report)
    _plot(histories, args.out / "history.png")
    print(table([{name: value for name, value in row.items() if name != "skipped"} for row in arms]))
    if compared:
        print("", "guided less the other arm, held out, 95 % intervals over prompts:", table(compared), sep="\n")
    print("", table([{name: value for name, value in cost.items() if name != "verdict"} for cost in costs]), sep="\n")
    print(*(f"{cost['skipped layers']} layers skipped: {cost['verdict']}" for cost in costs), sep="\n")
    return 0


def _search(args: argparse.Namespace, plan: Plan, search: MaskSearch, blocks: Sequence[Sequence[Dialogue]]) -> None:
    """Ray is started only where the log does not hold it all."""
    if search.ask() is None:
        return
    recipe = BenchRecipe(args.target, args.dtype, blocks)
    with connected(args.address):
        check_room(args, all_nodes())
        with search_bar(search, plan) as bar:

            def on_mask() -> None:
                history = search.histories[-1]
                best = f", best {min(history.costs):.3f}" if history.costs else ""  # sensitivities skip one layer only
                bar.set_postfix_str(f"{history.arm}, {history.space.num_skipped} skipped{best}", refresh=False)
                bar.update(search.num_asked + 1 - bar.n)  # it is counted when the next one is asked

            search_masks(search, recipe, args.out, num_cpus=args.cpus, num_gpus=args.gpus, on_mask=on_mask)
    if search.ask() is not None:
        if search.is_hopeless:
            raise ConfigError(f"search via: one mask after the other could not be judged; {_why(args.out / 'trials')}")
        raise ConfigError("search via: Ray Tune ended early; start again with the same flags to go on")


def search_bar(search: MaskSearch, plan: Plan) -> "tqdm[NoReturn]":
    """From the questions that the log answers to the most there may be: an arm may need less than its budget."""
    most = len(plan.sizes) * len(plan.arms) * plan.budget
    return tqdm(
        total=most, initial=search.num_asked, desc="questions", unit="mask", file=sys.stderr, dynamic_ncols=True
    )


def finals_bar(histories: Sequence[History], rungs: Sequence[Rung], log: MaskLog) -> "tqdm[NoReturn]":
    """From what the log answers to the most there may be: arms may share masks."""
    most = sum(min(rung.num_masks, len(set(history.masks))) for history in histories for rung in rungs)
    return tqdm(total=most, initial=len(log), desc="finals", unit="mask", file=sys.stderr, dynamic_ncols=True)


def check_room(args: argparse.Namespace, nodes: Sequence[Bundle]) -> None:
    """Raise ConfigError where no node could ever hold the trial, which would wait for one without a word."""
    if not any(Bundle(args.cpus, args.gpus).fits(node) for node in nodes):
        has = "; ".join(f"{node.num_cpus:g} and {node.num_gpus:g}" for node in nodes)
        raise ConfigError(
            f"--cpus {args.cpus:g} --gpus {args.gpus:g}: no node of this Ray has so many CPUs and GPUs ({has}); "
            "ask for fewer"
        )


def found_by(histories: Sequence[History], sizes: Sequence[int], why: str) -> list[History]:
    """The histories in which a mask was judged. Raises ConfigError, saying `why`, for a size that has none."""
    found = [history for history in histories if history.masks]
    lacking = set(sizes) - {history.space.num_skipped for history in found}
    if lacking:
        raise ConfigError(f"search via: no mask that skips {min(lacking)} layers could be judged; {why}")
    return found


def sound(histories: Sequence[History], held_out: Mapping[Mask, ByDialogue]) -> list[History]:
    """Those whose best mask has a number for its cost on held-out answers."""
    return [history for history in histories if math.isfinite(mean(held_out[history.best]).cost)]


def _why(record: Path) -> str:
    return f"{record} says why; start again with the same flags to try them again"


def _choose(
    args: argparse.Namespace,
    log: MaskLog,
    dialogues: Sequence[Sequence[Dialogue]],
    rungs: Sequence[Rung],
    histories: Sequence[History],
) -> list[History]:
    """The finals; the target is loaded only where the log does not hold them all."""
    benches = cache(BenchRecipe(args.target, args.dtype, dialogues).make)
    with finals_bar(histories, rungs, log) as bar:

        def judge(question: Question) -> None:
            bench, started = benches()[question.block], time.monotonic()
            found = bench.agreement(question.mask)
            if math.isfinite(found.cost):
                log.add(question, found, time.monotonic() - started)
            else:
                log.add_failed(question, time.monotonic() - started)
            bar.update(1)

        return finals(histories, rungs, log, judge)


def _judge(args: argparse.Namespace, dialogues: list[Dialogue], histories: Sequence[History]) -> dict[Mask, ByDialogue]:
    """Agreement on each of the held-out dialogues, of the best mask of each history."""
    target = load_target(args.target, dtype=args.dtype, max_length=max(len(dialogue.ids) for dialogue in dialogues))
    found: dict[Mask, list[tuple[int, Agreement]]] = {history.best: [] for history in histories}
    with tqdm(total=len(dialogues), desc="held-out", unit="prompt", file=sys.stderr, dynamic_ncols=True) as bar:
        for part in each_judged(target, dialogues, list(found)):
            for mask, one in part.items():
                found[mask] += one
            bar.update(len(next(iter(part.values()))))
    return dict(found)


def _row(history: History, held_out: Agreement) -> dict[str, Any]:
    return {
        "skipped layers": history.space.num_skipped,
        "arm": history.arm,
        "asked": history.num_asked,
        "masks": len(set(history.masks)),
        "cost": round(min(history.costs), 4),
        "final cost": round(min(history.final_costs.values()), 4),
        "held-out cost": round(held_out.cost, 4),
        "held-out KL": round(held_out.kl, 4),
        "held-out top-1": round(held_out.top1, 4),
        "skipped": list(history.best),
    }


def _compared(histories: Sequence[History], held_out: Mapping[Mask, ByDialogue]) -> list[dict[str, Any]]:
    """`guided` less each other arm of its size, on the same held-out rows; empty where it did not search."""
    found = []
    for guided in (history for history in histories if history.arm == "guided"):
        for other in histories:
            if other.space == guided.space and other is not guided:
                parts = difference(held_out[guided.best], held_out[other.best])
                head = {"skipped layers": guided.space.num_skipped, "less": other.arm}
                found.append(head | {name: str(interval) for name, interval in parts.items()})
    return found


def _best(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """By final cost."""
    return min(rows, key=lambda row: float(row["final cost"]))


def _mask(args: argparse.Namespace, row: dict[str, Any], num_layers: int, provenance: dict[str, Any]) -> dict[str, Any]:
    """A mask as profiles name it, with what was found of it and how."""
    return {
        "model": args.target,
        "digest": model_digest(args.target),
        "num_layers": num_layers,
        "kept": _kept(row, num_layers),
        "found": {name: value for name, value in row.items() if name != "skipped"},
        "provenance": provenance,
    }


def _kept(row: dict[str, Any], num_layers: int) -> list[int]:
    return [layer for layer in range(num_layers) if layer not in row["skipped"]]


def _costs(args: argparse.Namespace, best: dict[int, dict[str, Any]], num_layers: int) -> list[dict[str, Any]]:
    """Of each size's best mask: what a slim pass costs of a full one on this machine, and when it pays."""
    block = ModelDrafter().max_draft + 1
    counts = (1, block, 4 * block)
    target = load_target(args.target, dtype=args.dtype, max_length=measured_length(counts))
    costs = []
    for size, row in best.items():
        times = mask_pass_times(target, _kept(row, num_layers), counts)
        ratios = {f"slim/full, {rows} rows": round(times.slim[rows] / times.full[rows], 3) for rows in counts}
        costs.append({"skipped layers": size, **ratios, "verdict": saving_verdict(times, block)})
    return costs


def _plot(histories: Sequence[History], path: Path) -> None:
    sizes = dict.fromkeys(history.space.num_skipped for history in histories)
    charts = {
        f"{size} layers skipped": {h.arm: h.running_best for h in histories if h.space.num_skipped == size}
        for size in sizes
    }
    step_charts(charts, path, x_label="masks of that size", y_label="least DIMR cost so far")


def _identity(args: argparse.Namespace, blocks: Sequence[Sequence[Dialogue]]) -> str:
    """Of what a cost depends on: the model's weights, dtype, DIMR, and which rows of which texts are in which block."""
    digest = hashlib.sha256(json.dumps([resolve_model(args.target).key, args.dtype, ALPHA, BETA]).encode())
    for dialogues in blocks:
        digest.update(np.asarray([len(dialogue.prompt_ids) for dialogue in dialogues], dtype=np.int32).tobytes())
        for dialogue in dialogues:
            digest.update(np.asarray(dialogue.ids, dtype=np.int32).tobytes())
    return digest.hexdigest()[:16]
