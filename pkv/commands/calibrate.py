"""`pkv calibrate`: measure what things cost on this GPU, so that pkv can predict its times and choose by them.

The times of pkv's stages, and FlashInfer's, on some loads become the costs of a profile; loads that were not fitted say
how far its predictions are off. `--from FILE` takes the times from records, and needs no GPU.
"""

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pkv.bench.engines.registry import find_engines
from pkv.bench.fit.calibration import (
    ENGINES,
    LOADS,
    QUICK_LOADS,
    QUICK_ROUNDS,
    ROUNDS,
    Calibration,
    calibrate,
    engines_with,
)
from pkv.bench.measuring.live import can_time
from pkv.bench.measuring.sweep import Sweep, sweep
from pkv.bench.records.records import RecordError, Records, Run, Timing, read_records
from pkv.bench.records.regret import measured_regrets
from pkv.bench.records.tiles import as_served, best_tile
from pkv.cards.files import checked_name, name_for, shipped_names, write, write_own
from pkv.cards.known import forget_profiles
from pkv.commands import CommandError, arguments
from pkv.commands.output import Progress, complain, print_json, say, table
from pkv.plans.gpu import DEFAULT_TILE, GpuProfile

HELP = "measure what things cost on this GPU, for predictions and for policy='cost'"
MEANINGS = {
    "memory_gb_per_s": ("GB/s", "all programs together read at most"),
    "sm_gb_per_s": ("GB/s", "those of one SM"),
    "program_gb_per_s": ("GB/s", "one program"),
    "flashinfer_program_gb_per_s": ("GB/s", "one of FlashInfer's"),
    "merge_gb_per_s": ("GB/s", "one that merges"),
    "item_us": ("us", "start-up of an item"),
    "flashinfer_item_us": ("us", "of one of FlashInfer's"),
    "launch_us": ("us", "from one kernel to the next"),
    "step_us": ("us", "once a step"),
}
MEASURED_HERE = "measured by pkv calibrate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--quick", action="store_true", help="fewer loads and rounds: under a minute on a large GPU")
    parser.add_argument("--name", metavar="NAME", help="of the profile (default: the card's, and its SMs)")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="take the times from these records")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write here, and keep what else the file says (default: your cache)"
    )
    arguments.add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Measure or read, fit, print, write."""
    try:
        check(args)
        records = measured(args.quick) if args.source is None else read_records([args.source])
        run = only_run(records, args.source)
        card = card_of(run, args.name or (name_for(args.out.stem) if args.out else None))
        kept = kept_fields(args.out, card)
        found = calibrate(records, card)
    except RecordError as error:
        raise CommandError(str(error)) from None
    except ValueError as error:
        raise CommandError(f"cannot calibrate: {error}") from None
    regrets = measured_regrets(as_served(records, found.profile.tile), found.profile, found.loads("held out"))
    fields = fields_of(found, run, args) | kept
    try:
        file = write_own(card.name, fields) if args.out is None else write(args.out, fields)
    except OSError as error:
        where = args.out or "your cache folder"
        raise CommandError(f"cannot write to {where}: {error.strerror}; name a file elsewhere with --out") from None
    forget_profiles()
    if args.json:
        residuals = [asdict(residual) | {"error": residual.error} for residual in found.residuals]
        judged = [dict(zip(("route", "trace", "mean", "worst"), entry, strict=True)) for entry in regrets]
        rest = {"not_measured": found.not_measured, "residuals": residuals, "regret": judged}
        print_json({"file": str(file)} | fields | rest)
        return 0
    say(as_text(found, regrets))
    say(f"\nwritten to {file}\n{how_to_use(found.profile, args.out, args.source)}")
    return 0


def check(args: argparse.Namespace) -> None:
    """CommandError, or ValueError of a name, for what cannot be done, before anything is measured."""
    if args.quick and args.source is not None:
        raise CommandError("--quick says how to measure, and --from takes times that were measured: leave out one")
    if args.out is not None:
        read_out(args.out)
        if not args.out.parent.is_dir():
            raise CommandError(f"cannot write to {args.out}: there is no such folder; make it, or name another")
    if args.name is not None:
        checked_name(args.name)
        if args.out is None and args.name in shipped_names():
            raise CommandError(f"--name {args.name} ships with pkv, and yours would hide it: choose another name")


def measured(quick: bool) -> Records:
    """Records of this GPU's times: which tile is best, then the other stages with it; CommandError without a GPU."""
    if not can_time():
        raise CommandError("calibrate measures a GPU, and there is none here: take times from records with --from FILE")
    loads, rounds = (QUICK_LOADS, QUICK_ROUNDS) if quick else (LOADS, ROUNDS)
    progress = Progress(2 * len(loads))
    try:
        first = swept(Sweep("calibration", loads, tuple(find_engines(ENGINES)), rounds), progress)
        others = engines_with(best_tile(first)[0])
        second = swept(Sweep("calibration", loads, tuple(find_engines(others)), rounds), progress)
    finally:
        progress.end()
    timings = first.timings + second.timings
    if refusal := next((each.refused for each in timings if each.engine == "flashinfer" and each.refused), None):
        complain(f"pkv's own stages only, without FlashInfer's costs: {refusal}")
    return Records(first.runs | second.runs, first.loads, timings)


def swept(todo: Sweep, progress: Progress) -> Records:
    """What a sweep finds; what is wrong is said, and left out."""
    runs: dict[str, Run] = {}
    timings: list[Timing] = []
    device = torch.device("cuda", torch.cuda.current_device())
    for run, load, found in sweep(todo, device, progress.step):
        runs[run.run] = run
        timings += found.timings
        for engine, reason in found.wrong.items():
            complain(f"{load.name}: {engine} is left out: {reason}")
    return Records(runs, {load.name: load for load in todo.loads}, tuple(timings))


def only_run(records: Records, source: Path | None) -> Run:
    """The run of the records; CommandError where they are of several cards."""
    cards = {(run.gpu["title"], run.gpu["arch"], run.gpu["n_sms"]): run for run in records.runs.values()}
    if len(cards) != 1:
        named = ", ".join(f"{title} with {n_sms} SMs" for title, _, n_sms in cards) or "none"
        raise CommandError(f"--from {source} holds times of {len(cards)} cards ({named}): a profile is of one")
    return next(iter(cards.values()))


def card_of(run: Run, name: str | None) -> GpuProfile:
    """The card that a run was taken on, yet without costs."""
    title, n_sms = run.gpu["title"], run.gpu["n_sms"]
    return GpuProfile(name or f"{name_for(title)}-{n_sms}-sms", run.gpu["arch"], n_sms)


def read_out(out: Path) -> dict[str, Any]:
    """The profile that --out names, empty where there is no such file; CommandError where it is no profile."""
    if not out.exists():
        return {}
    try:
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return {"arch": found["arch"], "n_sms": found["n_sms"]} | found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"--out {out} is no profile ({error!r}): delete it, or name another file") from None


def kept_fields(out: Path | None, card: GpuProfile) -> dict[str, Any]:
    """What the file says already, of the same card: a shipped profile's title, nominal figures and source stay."""
    found = read_out(out) if out is not None else {}
    if found and (found["arch"], found["n_sms"]) != (card.arch, card.n_sms):
        raise CommandError(
            f"--out {out} is of a card of arch {found['arch']} with {found['n_sms']} SMs, and the times are of arch "
            f"{card.arch} with {card.n_sms}: name another file"
        )
    return {name: value for name, value in found.items() if name not in ("tile", "costs", "costs_source")}


def fields_of(found: Calibration, run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """What the profile's file says of the card, its costs, and where they come from."""
    profile = found.profile
    assert profile.costs is not None
    words = ["pkv", "calibrate", *(["--quick"] if args.quick else [])]
    given = {"--from": args.source and told(args.source), "--out": args.out and told(args.out), "--name": args.name}
    words += [word for option, value in given.items() if value for word in (option, value)]
    return {
        "title": run.gpu["title"],
        "arch": profile.arch,
        "n_sms": profile.n_sms,
        "tile": profile.tile,
        "costs": {name: value for name, value in asdict(profile.costs).items() if value is not None},
        "costs_source": {
            "times": told(args.source) if args.source else MEASURED_HERE,
            "date": run.date,
            "commit": run.commit,
            "versions": run.versions,
            "fitted_loads": found.loads("fit"),
            "errors": found.errors(),
            "tile_times": {str(tile): round(ratio, 4) for tile, ratio in found.tile_times.items()},
            "command": shlex.join(words),
        },
    }


def told(file: Path) -> str:
    """The path as it was given; of an absolute one its name alone, for the folders are this machine's."""
    return file.name if file.is_absolute() else file.as_posix()


def as_text(found: Calibration, regrets: list[tuple[str, str, float, float]]) -> str:
    """Every cost with its unit, every load's residual, what held-out loads say, and the choice of the tile."""
    assert found.profile.costs is not None
    costs = asdict(found.profile.costs)
    unknown = dict.fromkeys(found.not_measured, ", but no time here depends on it")
    rows = [
        [name, f"{costs[name]:g}", unit, meaning + unknown.get(name, "")]
        for name, (unit, meaning) in MEANINGS.items()
        if costs[name] is not None
    ]
    width = max(len(row[3]) for row in rows)
    parts = [f"{found.profile.name}: arch {found.profile.arch}, {found.profile.n_sms} SMs"]
    parts.append(table(["cost", "value", "unit", "what it is"], [[*row[:3], row[3].ljust(width)] for row in rows]))
    lines = [
        [
            f"{each.load}, {each.engine}",
            f"{each.measured_us:.1f}",
            f"{each.predicted_us:.1f}",
            f"{each.error:+.1%}",
            each.role,
        ]
        for each in sorted(found.residuals, key=lambda each: each.role)
    ]
    parts.append(table(["load, engine", "measured us", "predicted us", "error", "role"], lines))
    for role, errors in found.errors().items():
        parts.append(
            f"{role}: {errors['rows']} times, median error {errors['median']:.1%}, worst {errors['worst']:.1%}"
        )
    tiles = ", ".join(f"{tile}: {ratio:.3f}" for tile, ratio in found.tile_times.items())
    why = "" if found.profile.tile != DEFAULT_TILE else ", as none gains more than the noise"
    parts.append(
        f"tile {found.profile.tile}{why} ({found.noise:.1%}); GPU time over tile {DEFAULT_TILE}'s, mean: {tiles}"
        if len(found.tile_times) > 1
        else f"tile {found.profile.tile}: no other was timed"
    )
    if regrets:
        lines = [[f"{route}, {trace}", f"{mean:.1%}", f"{worst:.1%}"] for route, trace, mean, worst in regrets]
        parts.append("regret on loads held out, by measured times\n" + table(["route, trace", "mean", "worst"], lines))
    return "\n\n".join(parts)


def how_to_use(profile: GpuProfile, out: Path | None, source: Path | None) -> str:
    """Where the profile is taken from now on."""
    if out is not None:
        times = ["--from", str(source)] if source else []
        name = f"my-{profile.name}" if profile.name in shipped_names() else profile.name
        return f"to use it by name: {shlex.join(['pkv', 'calibrate', *times, '--name', name])}"
    return (
        f"from now on pkv takes it by itself on this card; anywhere by name: gpu={profile.name!r}, or\n"
        f"pkv explain --gpu {profile.name} --policy cost --lengths 16384,900,300"
    )
