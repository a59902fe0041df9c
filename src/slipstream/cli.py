"""The command line: `slipstream COMMAND`, one of `COMMANDS`.

Exit codes: 0 done, 1 the run failed, 2 bad input (nothing was started), 130 interrupted by Ctrl-C, 143 by SIGTERM, 129
by SIGHUP. Errors go to stderr without a traceback. torch and transformers are imported inside the commands that
compute, after their input was checked.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypedDict, get_args, get_origin

import tyro
from pydantic import BaseModel
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from slipstream.core.config import PRESETS, RunConfig
from slipstream.core.errors import ConfigError, SlipstreamError, did_you_mean
from slipstream.core.interrupts import SIGNALS, Interrupted, Interrupts, in_words
from slipstream.core.other_names import counterparts, sentence_of_value, sentences
from slipstream.core.plain import parse_float, parse_int, wrong_path, wrong_text
from slipstream.core.recipes import (
    RESUMED_WITH,
    check_path,
    defaults,
    field_paths,
    list_recipes,
    load_recipe,
    merge,
    read_toml,
    recipes_dir,
    resolve,
    resumed_config,
    same_name,
)
from slipstream.core.run_lock import check_free
from slipstream.core.sections import Precision

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130

_console = Console()
_errors = Console(stderr=True)
_MAX_ERROR_LINE = 4000
_SCREEN = 22  # lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code. tyro raises SystemExit for --help (0), bad flags (2)."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        _print_help()
        return EXIT_DONE
    return _exit_code(lambda: _command(name, rest)(rest))


def _command(name: str, rest: Sequence[str]) -> Callable[[Sequence[str]], int]:
    if wrong := next(filter(None, map(wrong_text, [name, *rest])), None):
        raise ConfigError("an argument is no text", got=wrong, allowed="UTF-8")
    if name not in COMMANDS:
        raise ConfigError(
            f"unknown command '{name}'",
            allowed=", ".join(COMMANDS),
            hint=did_you_mean(name, COMMANDS) or "a command comes first: `slipstream run RECIPE ...`",
        )
    return COMMANDS[name]


def _exit_code(work: Callable[[], int]) -> int:
    """What `work` returns, or the code of what it raises, which is told."""
    try:
        with Interrupts(ends_imports=True):
            return work()
    except ConfigError as error:
        _print_error(error)
        return EXIT_BAD_INPUT
    except SlipstreamError as error:
        _print_error(error)
        return EXIT_FAILED
    except BrokenPipeError:  # the reader of `slipstream ... | head` left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT
        _errors.print(in_words(number), style="yellow")
        return 128 + number


def run_command(argv: Sequence[str]) -> int:
    """Train a model by a recipe; any field of the configuration is a flag."""
    options = _parse("run", _run_options(_recipe_defaults(argv), argv), argv, run_command)
    return _train(_run_config(options), options)


def _train(config: RunConfig | str, options: Any, **more: Any) -> int:
    """Run; the exit code is the run's, whatever becomes of the terminal."""
    from slipstream.api import run
    from slipstream.observe.outlet import lasting_output

    if options.resume is not None and options.overrides:
        more["overrides"] = as_overrides(options.overrides)

    def train() -> int:
        result = run(config, out=options.out, resume=options.resume, **more)
        return {"done": EXIT_DONE, "interrupted": EXIT_INTERRUPTED}.get(result.summary["status"], EXIT_FAILED)

    with lasting_output():
        return _exit_code(train)


def eval_command(argv: Sequence[str]) -> int:
    """Measure a model on held-out prompts, greedy and sampled: mean reward, and accuracy by `eval.measure`."""
    options = _parse("eval", _eval_options(_recipe_defaults(argv), argv), argv, eval_command)
    model, config = _eval_config(options)
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        raise ConfigError(
            "the answers cannot be written there", got=options.out, allowed="a file in an existing folder"
        )
    from slipstream.evals.evaluate import evaluate, write_answers

    result = evaluate(
        config, num_prompts=options.num_prompts, num_samples=1 if options.num_samples is None else options.num_samples
    )
    several = {f"pass@{k}": value for k, value in result.pass_at_k.items() if k > 1}
    if result.num_samples > 1:
        several["with signal"] = result.signal_frac  # groups that RL could learn from
    table = Table(
        "", "greedy", "sampled", title=f"{model}, {result.num_prompts} held-out prompts", title_justify="left"
    )
    rows = [("accuracy", result.accuracy, result.sampled_accuracy), ("reward", result.reward, result.sampled_reward)]
    parts = result.reward_parts | result.sampled_reward_parts
    if len(parts) > 1:
        found = (result.reward_parts, result.sampled_reward_parts)
        rows += [(f"  {name}", found[0].get(name), found[1].get(name)) for name in parts]
    rows += [(name, None, value) for name, value in several.items()]
    for name, *values in rows:
        if values != [None, None]:
            table.add_row(Text(name), *("" if value is None else f"{value:.3f}" for value in values))
    _console.print(table)
    if result.num_failed:
        told = "they count as wrong, with the reward rewards.failure_reward"
        _console.print(f"{result.num_failed} answers could not be scored: {told}", style="yellow")
    if options.out is not None:
        write_answers(result, options.out)
        _console.print(f"answers: {options.out}", soft_wrap=True)
    return EXIT_DONE


def report_command(argv: Sequence[str]) -> int:
    """Write a page about a run from its files, or about several beside each other, and say where it is."""
    options = _parse("report", ReportOptions, argv, report_command)
    from slipstream.observe.report import report

    _console.print(f"report: {report(*options.runs, out=options.out)}", highlight=False, soft_wrap=True)
    return EXIT_DONE


def watch_command(argv: Sequence[str]) -> int:
    """Show a run in the browser, live while it goes on and with a time slider afterwards, until Ctrl-C."""
    options = _parse("watch", WatchOptions, argv, watch_command)
    from slipstream.observe.watch import watch

    with watch(options.run, port=options.port, open_browser=options.open) as page:
        what = f"watching {options.run}" if options.run.exists() else f"waiting for a run in {options.run}"
        _console.print(f"{what} at {page.url} (Ctrl-C ends it)", highlight=False, markup=False, soft_wrap=True)
        page.wait()
    return EXIT_DONE


def replay_command(argv: Sequence[str]) -> int:
    """Run a run's recorded events through the schedule again; the first line that it would decide otherwise."""
    options = _parse("replay", ReplayOptions, argv, replay_command)
    from slipstream.controller.replay import replay

    started_s = time.perf_counter()
    found = replay(options.path)
    wall_s = time.perf_counter() - started_s
    resumed = f", resumed {len(found.policies) - 1} times" if len(found.policies) > 1 else ""
    dropped = ", ".join(f"{count} {cause}" for cause, count in sorted(found.num_dropped.items())) or "none"
    rows = {
        "decisions": f"{found.num_decisions:,} in {wall_s:.2f} s ({found.num_decisions / wall_s:,.0f} a second)",
        "policy": found.policies[0] + resumed,
        "steps": f"{found.num_steps:,}",
        "groups": f"{found.num_admitted:,} admitted, {found.num_trained:,} trained, dropped: {dropped}",
        "staleness": f"{found.max_staleness} at most",
        "replicas lost": f"{found.num_lost}",
    }
    if found.ended_with is not None:
        rows["the run ended"] = found.ended_with
    for name, value in rows.items():
        _console.print(f"{name:<14} {value}", highlight=False, markup=False, soft_wrap=True)
    for violation in found.violations:
        _console.print(f"broken: {violation}", style="red", highlight=False, markup=False, soft_wrap=True)
    if (first := found.divergence) is not None:
        for name, text in (
            (f"line {first.line} differs", first.event),
            ("  recorded", first.recorded),
            ("  now", first.replayed),
        ):
            _console.print(f"{name}: {text}", style="red", highlight=False, markup=False, soft_wrap=True)
    for lost in found.missing:
        _console.print(f"incomplete: {lost}", style="red", highlight=False, markup=False, soft_wrap=True)
    if found.is_sound and found.is_complete:
        _console.print("the schedule decides as it did, and nothing is broken", style="green")
    elif found.is_sound:
        _console.print(
            f"nothing differs in the {found.num_decisions:,} decisions that could be checked; "
            f"{found.num_unchecked:,} lines could not",
            soft_wrap=True,
        )
    return EXIT_DONE if found.is_sound and found.is_complete else EXIT_FAILED


def plan_command(argv: Sequence[str]) -> int:
    """Split GPUs over trainer and generators: the best configurations, what a step takes and costs, and why."""
    options = vars(_parse("plan", PlanOptions, argv, plan_command)).copy()
    as_json, out = options.pop("json"), options.pop("out")
    if options["model"] is None:
        raise ConfigError(
            "a model is needed",
            allowed="a name (llama-3.1-8b), a Hugging Face folder or config.json, a recipe, the folder of a run",
            hint="try `slipstream plan llama-3.1-8b --gpus 16`",
        )
    from slipstream.plan.answer import answer
    from slipstream.plan.question import Question
    from slipstream.plan.recipe import check_writable
    from slipstream.plan.show import show

    if out is not None:
        check_writable(out)
    found = answer(Question(**options))
    if as_json:
        _console.print_json(data=found.to_dict())
    else:
        show(found, _console)
    if out is not None:
        found.write_recipe(out)
        _errors.print(f"recipe: {out}", highlight=False, soft_wrap=True)
    return EXIT_DONE


def simulate_command(argv: Sequence[str]) -> int:
    """What a finished run would have been with other dials: step time, who waits, staleness, from its own files."""
    options = _parse("simulate", _simulate_options(_shown_of_run(argv), argv), argv, simulate_command)
    if options.run is None:
        raise ConfigError("a run is needed", allowed="the folder of a finished run", hint="`slipstream run` makes one")
    from slipstream.plan.what_if import show, what_if

    overrides = as_overrides(options.overrides)
    for flag, field in (("generators", "replicas"), ("slots", "num_slots")):
        if getattr(options, flag) is not None:
            overrides = merge(overrides, {"generator": {field: getattr(options, flag)}})
    found = what_if(
        [options.run, *(options.beside or ())],
        overrides,
        preset=options.preset,
        reward_s=options.reward_s,
        seeds=options.seeds,
        events=options.events,
    )
    if options.json:
        _console.print_json(data=found.to_dict())
    else:
        show(found, _console)
    return EXIT_DONE


def recipes_command(argv: Sequence[str]) -> int:
    """List the shipped recipes, or the reasoning-gym tasks they can be built from."""
    options = _parse("recipes", RecipesOptions, argv, recipes_command)
    if options.tasks:
        from slipstream.prompts.tasks import task_names

        _console.print("\n".join(task_names()), highlight=False)
        return EXIT_DONE
    table = Table("recipe", Column("what it does", overflow="fold"), show_edge=False)
    for recipe in list_recipes():
        needs = f"\nneeds {', '.join(recipe.needs)}" if recipe.needs else ""
        table.add_row(recipe.name, Text.assemble(recipe.description, (needs, "yellow")))
    _console.print(table)
    _console.print(
        "\nStart one with `slipstream run RECIPE`. What it needs of the Hugging Face hub is downloaded then, or before"
        "\nwith `hf download NAME` (data: `--repo-type dataset`). Files are yours to make, as the recipe's text says."
        f"\nFiles: {recipes_dir()}",
        soft_wrap=True,
    )
    return EXIT_DONE


def doctor_command(argv: Sequence[str]) -> int:
    """Say what this machine has, and what of Slipstream works on it."""
    options = _parse("doctor", DoctorOptions, argv, doctor_command)
    from slipstream.doctor import examine, render

    findings = examine()
    if options.json:
        _console.print_json(data=findings.to_dict())
    else:
        render(findings, _console)
    return EXIT_DONE


def launch_command(argv: Sequence[str]) -> int:
    """Run on several machines: be the controller, be a group that joins it, or write the job files for both."""
    options = _parse("launch", _launch_options(_recipe_defaults(argv), argv), argv, launch_command)
    files = [name for name in ("slurm", "kubernetes") if getattr(options, name) is not None]
    if len(files) + (options.group is not None) != 1:
        raise ConfigError("launch does one thing", allowed="--group NAME, --slurm DIR or --kubernetes DIR")
    if files:
        from slipstream.jobs.files import write_job_files

        return write_job_files(_run_config(options), options, files[0], _console)
    from slipstream.launch import CONTROLLER_GROUP, Job, cluster_of, join

    if options.group == CONTROLLER_GROUP:
        config = _run_config(options)
        listen, remote = options.listen or "127.0.0.1:0", options.remote or ()
        cluster = cluster_of(listen, options.key_file, options.address_file, remote)
        return _train(config, options, cluster=cluster)
    if options.remote is not None:
        raise ConfigError("the controller is told which groups join it", got=f"--remote with --group {options.group}")
    not_ours = [name for name in ("recipe", "preset", "out", "resume") if getattr(options, name) is not None]
    not_ours += [name for name in as_overrides(options.overrides) if name != "max_restarts"]
    if not_ours:
        raise ConfigError(
            "a group takes its configuration from the controller",
            got=f"{', '.join(not_ours)} with --group {options.group}",
            allowed="what `slipstream launch --help` calls a group's, and --max-restarts",
            hint="give it to the controller's command",
        )
    if options.controller is None:
        raise ConfigError("a group joins a controller", allowed="--controller HOST:PORT, or the file with that")
    check_path(options.controller, "--controller")
    flags = vars(options) | as_overrides(options.overrides)  # of the run's fields a group takes --max-restarts
    given = {field.name: flags.get(field.name) for field in dataclasses.fields(Job)}
    join(Job(**{name: value for name, value in given.items() if value is not None}))
    return EXIT_DONE


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": run_command,
    "launch": launch_command,
    "eval": eval_command,
    "report": report_command,
    "watch": watch_command,
    "replay": replay_command,
    "simulate": simulate_command,
    "plan": plan_command,
    "recipes": recipes_command,
    "doctor": doctor_command,
}


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Flags of `slipstream report`."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folder of a run; folders of several to compare them."""

    out: Path | None = None
    """File for the page. Default: report.html in the run's folder; of several, comparison.html in this one."""


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """Flags of `slipstream watch`."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, which need not have begun."""

    port: int = 7878
    """Port on loopback; 0 takes one that is free."""

    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Open it in the default browser."""


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """Flags of `slipstream replay`."""

    path: tyro.conf.Positional[Path]
    """Folder of a run, or of an attempt_<n> in it, or an events.jsonl."""


_Model = Annotated[str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")]
_Int = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
_Float = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
_Path = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
_Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
_Precisions = Annotated[
    tuple[Precision, ...] | None, tyro.conf.arg(metavar="float32|bfloat16|fp8 ...", help_behavior_hint="")
]


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Flags of `slipstream plan`; what is left out has defaults, which are printed, or is the recipe's or the run's."""

    model: tyro.conf.Positional[_Model] = None
    """A published model by name, a Hugging Face folder or config.json, a recipe, or the folder of a run."""
    gpus: _Int = None
    """How many GPUs there are."""
    gpu: _Name = None
    """Which: a100, h100, h200, b200."""
    gpus_per_node: _Int = None
    """GPUs of a node, which NVLink joins."""
    network: _Float = None
    """Between nodes: GB/s for each GPU, one way."""
    cluster: _Path = None
    """TOML file with all of that, for GPUs that are not known by name."""
    price: _Float = None
    """US dollars for an hour of one GPU."""
    measured: _Path = None
    """Measured curves (benchmarks/eta_curves.py) in place of the hardware table; without --gpus: of this CPU."""
    prompt_tokens: _Float = None
    """Mean length of a prompt."""
    completion_tokens: _Float = None
    """Mean length of a completion."""
    p99_tokens: _Float = None
    """What one completion in a hundred exceeds."""
    max_new_tokens: _Int = None
    """The longest completion there is room for."""
    lengths: _Path = None
    """Folder of a run: its completions' lengths."""
    groups_per_step: _Int = None
    """Prompts of a step."""
    completions_per_group: _Int = None
    """Completions of a prompt."""
    precision: _Precisions = None
    """Of the generators: those to be tried."""
    max_staleness: _Int = None
    """Largest bound to be tried, in steps."""
    reference: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """There is a reference policy, for a KL penalty."""
    critic: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """There is a critic of the policy's size."""
    reward_model: _Name = None
    """The model that scores, named as the policy is."""
    rows: Annotated[int, tyro.conf.arg(metavar="INT")] = 3
    """Configurations in the table."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""
    out: _Path = None
    """Write the best configuration as a recipe."""


@dataclasses.dataclass(frozen=True)
class RecipesOptions:
    """Flags of `slipstream recipes`."""

    tasks: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """List the reasoning-gym tasks instead."""


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Flags of `slipstream doctor`."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""


def override_flags(model: type[BaseModel], shown: Mapping[str, Any], only: Collection[str] | None = None) -> Any:
    """A TypedDict type with one optional key per field of `model`, from which tyro makes typed flags.

    Only flags that were given are in the result, so an override can be told from a default. `shown` are the values that
    the help prints. Lists of sections (`prompts.tasks`) have no flag: they are set in TOML. `only`: these fields, with
    dots where they are those of sections.
    """
    keys: dict[str, Any] = {}
    annotated: Any = Annotated  # the types are built at run time
    make_typed_dict: Any = TypedDict
    for name, info in model.model_fields.items():
        kind, value = info.annotation, shown.get(name)
        if name == "recipe":  # every command takes it as an argument of its own
            continue
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            start = f"{name}."
            inside = None if only is None else {field.removeprefix(start) for field in only if field.startswith(start)}
            if inside is None or inside:
                section = override_flags(kind, value if isinstance(value, Mapping) else {}, inside)
                keys[name] = annotated[section, tyro.conf.arg(help=info.description)]
        elif only is not None and name not in only:
            continue
        elif get_origin(kind) is dict:  # as pairs: tyro cannot leave a dict out
            pairs: Any = types.GenericAlias(list, types.GenericAlias(tuple, get_args(kind)))
            keys[name] = annotated[pairs, tyro.conf.arg(help=info.description, help_behavior_hint=_hint(value))]
        elif not any(isinstance(item, type) and issubclass(item, BaseModel) for item in get_args(kind)):
            keys[name] = annotated[kind, tyro.conf.arg(help=info.description, help_behavior_hint=_hint(value))]
    return make_typed_dict(model.__name__, keys, total=False)


def as_overrides(parsed: Mapping[str, Any], model: type[BaseModel] = RunConfig) -> dict[str, Any]:
    """What tyro parsed, as nested tables: pairs become tables again, sections without a flag vanish."""
    tables: dict[str, Any] = {}
    for name, value in parsed.items():
        kind = model.model_fields[name].annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if section := as_overrides(value, kind):
                tables[name] = section
        else:
            tables[name] = dict(value) if get_origin(kind) is dict else value
    return tables


def _hint(value: Any) -> str:
    return "" if value is None else f"(default: {value})"


def _run_options(shown: Mapping[str, Any], argv: Sequence[str] | None = None) -> Any:
    return _options(
        "RunOptions",
        shown,
        argv,
        ("recipe", "Name of a shipped recipe (`slipstream recipes`), or the path of a .toml file.", str, True),
        ("preset", f"How asynchronous to be: {', '.join(PRESETS)}.", str, False),
        ("out", "Folder of the run, new or empty. Default: runs/RECIPE-TIME.", Path, False),
        (
            "resume",
            "Folder of a run to go on with, from its last checkpoint; with --steps N also of one that is done.",
            Path,
            False,
        ),
    )


def _launch_options(shown: Mapping[str, Any], argv: Sequence[str] | None = None) -> Any:
    return _options(
        "LaunchOptions",
        shown,
        argv,
        ("recipe", "Recipe of the run: for the controller and for job files.", str, True),
        (
            "group",
            "What this machine is: controller, trainer, generator-0, generator-1 ..., or of --remote.",
            str,
            False,
        ),
        ("listen", "Controller: HOST:PORT where groups reach it. Default: 127.0.0.1:0.", str, False),
        ("address_file", "Controller: file for the HOST:PORT it listens at.", Path, False),
        (
            "remote",
            "Controller, job files: groups that join, too: reward_models, reference. Default: none; in job files those"
            " on CUDA.",
            tuple[str, ...],
            False,
        ),
        ("controller", "Group: HOST:PORT of the controller, or the file with that.", str, False),
        ("key_file", "The run's key, mode 0600; the controller makes it. Default: SLIPSTREAM_RUN_KEY.", Path, False),
        ("address", "Group: address where the others reach this machine. Default: 127.0.0.1.", str, False),
        ("nnodes", "Group: machines that it is on. Default: 1.", int, False),
        ("node_rank", "Group: which of them this is. Default: 0.", int, False),
        ("rendezvous", "Group on several machines: HOST:PORT on machine 0, where they meet.", str, False),
        ("threads", "Group: compute threads per process. Default: the machine's cores, divided.", int, False),
        ("slurm", "Folder for the files of SLURM jobs; nothing is started.", Path, False),
        ("kubernetes", "Folder for Kubernetes manifests; nothing is started.", Path, False),
        ("gpus_per_node", "Job files: GPUs of a machine. Default: 8.", int, False),
        ("partition", "SLURM: partition.", str, False),
        ("account", "SLURM: account.", str, False),
        ("time", "SLURM: time limit. Default: 24:00:00.", str, False),
        ("image", "Kubernetes: container image with Slipstream installed.", str, False),
        ("namespace", "Kubernetes: namespace. Default: kubectl's present one.", str, False),
        ("preset", f"How asynchronous to be: {', '.join(PRESETS)}.", str, False),
        ("out", "Folder of the run, new or empty. Default: runs/RECIPE-TIME.", Path, False),
        ("resume", "Folder of a run to go on with, as in `slipstream run`.", Path, False),
    )


def _simulate_options(shown: Mapping[str, Any], argv: Sequence[str] | None = None) -> Any:
    from slipstream.plan.what_if import DIALS

    flag: Any = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="Print JSON.")]
    seeds: Any = Annotated[int, tyro.conf.arg(help="Simulations of each run, whose mean is told.")]
    return _options(
        "SimulateOptions",
        shown,
        argv,
        ("run", "Folder of a finished run.", Path, True),
        ("preset", f"How asynchronous to be: {', '.join(PRESETS)}.", str, False),
        ("generators", "The same as --generator.replicas.", int, False),
        ("slots", "The same as --generator.num-slots.", int, False),
        ("reward_s", "Seconds that the reward takes for a completion. Default: as in the run.", float, False),
        ("beside", "More runs of this model on this machine, to calibrate by.", tuple[Path, ...], False),
        ("events", "File for the decisions of the changed run, as `slipstream replay` takes them.", Path, False),
        only=DIALS,
        more=[("seeds", seeds, 3), ("json", flag, False)],
    )


@contextmanager
def _on_one_screen() -> Iterator[None]:
    """What tyro says of bad flags, shortened in the middle: it quotes arguments whole, and lists sections."""
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            yield
    finally:
        lines = told.getvalue().splitlines()
        if len(lines) > _SCREEN:
            lines[_SCREEN - 4 : -3] = ["│ ..."]
        if lines and sys.stderr is not None:
            sys.stderr.write("".join(f"{line}\n" for line in lines))


def _shown_of_run(argv: Sequence[str]) -> dict[str, Any]:
    """The values that --help shows: those of the run on the command line, where it names one."""
    folders = (Path(word) for word in argv if wrong_path(word) is None)
    folder = next((folder for folder in folders if (folder / "config.toml").is_file()), None)
    return defaults() if folder is None else merge(defaults(), read_toml(folder / "config.toml"))


def _eval_options(shown: Mapping[str, Any], argv: Sequence[str] | None = None) -> Any:
    return _options(
        "EvalOptions",
        shown,
        argv,
        (
            "model",
            "Folder of a run, or a Hugging Face checkpoint: folder or hub id (then --recipe says on what).",
            Path,
            True,
        ),
        ("recipe", "Recipe whose prompts and rewards to use. Default: the run's own configuration.", str, False),
        ("num_prompts", "Held-out prompts to answer. Default: eval.num_prompts.", int, False),
        ("num_samples", "Sampled answers per prompt, for pass@k. Default: 1.", int, False),
        ("out", "File for the answers, one JSON object a line. Default: none.", Path, False),
    )


def _options(
    name: str,
    shown: Mapping[str, Any],
    argv: Sequence[str] | None,
    *own: tuple[str, str, Any, bool],
    only: Collection[str] | None = None,
    more: Sequence[tuple[str, Any, Any]] = (),
) -> Any:
    """A dataclass of the command's own flags (name, help, type, is positional), all optional, plus all overrides.

    `more` has flags with defaults (name, annotation, default); `only` these fields can be overridden. For `argv` it may
    have the flags in it alone.
    """
    fields: list[Any] = []
    annotated: Any = Annotated  # the types are built at run time
    positional: Any = tyro.conf.Positional
    for field, text, kind, is_positional in own:
        annotation = annotated[kind | None, tyro.conf.arg(help=text, help_behavior_hint="", metavar=field.upper())]
        fields.append((field, positional[annotation] if is_positional else annotation, None))
    fields += more
    own_flags = {field for field, *_ in fields}
    if argv is not None and "--help" not in argv:
        _check_words(argv, own_flags)
    given = _given(argv, own_flags)
    if given is not None:
        only = given if only is None else given & set(only)
    flags = annotated[override_flags(RunConfig, shown, only), tyro.conf.arg(name="")]
    return dataclasses.make_dataclass(name, [*fields, ("overrides", flags, dataclasses.field(default_factory=dict))])


def _check_words(argv: Sequence[str], own: Collection[str]) -> None:
    """Raise ConfigError for flags of another trainer or of another section, and another trainer's values of ours."""
    known = set(field_paths(RunConfig))
    foreign: list[str] = []
    for word, following in pairwise([*argv, ""]):
        if not word.startswith("--"):
            continue
        flag, is_joined, joined = word.partition("=")
        field = flag[2:].replace("-", "_")
        value = joined if is_joined else following
        if field in known:
            if (said := sentence_of_value(field, value, as_flags=True)) is not None:
                raise ConfigError(f"unknown value of '{flag}'", got=value, hint=said)
        elif field not in own and re.sub(r"(^|\.)no_", r"\1", field) not in known:
            if counterparts(field):
                foreign.append(field)
            elif not foreign and (meant := same_name(field)) is not None:
                raise ConfigError(f"unknown flag '{flag}'", hint=f"did you mean '--{meant.replace('_', '-')}'?")
    if foreign:
        raise ConfigError(
            "unknown flag " + ", ".join(f"'--{field}'" for field in foreign),
            allowed="fields of the configuration; --help lists them",
            hint=sentences(foreign, as_flags=True),
        )


def _given(argv: Sequence[str] | None, own: Collection[str]) -> set[str] | None:
    """The fields of a run that `argv` has flags for: a parser of all of them takes a quarter of a second to make.

    None where it takes all: for help, and to say what is near a flag that does not exist.
    """
    if argv is None:
        return None
    flags = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    fields = {re.sub(r"(^|\.)no_", r"\1", flag) for flag in flags - set(own)}
    return fields if fields <= set(field_paths(RunConfig)) and "-h" not in argv else None


@_on_one_screen()
def _parse(command: str, options: Any, argv: Sequence[str], documented: Callable[..., int]) -> Any:
    found = tyro.cli(
        options, args=list(argv), prog=f"slipstream {command}", description=documented.__doc__, registry=_strict()
    )
    for name, value in vars(found).items():
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                check_path(path, f"'{name}'")
    return found


def _strict() -> ConstructorRegistry:
    """What flags are read by: numbers in ASCII digits alone."""
    registry = ConstructorRegistry()

    def rule_of(kind: type, parse: Callable[[str], Any]) -> None:
        @registry.primitive_rule
        def rule(found: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
            if found.type is not kind:
                return None
            return PrimitiveConstructorSpec(
                nargs=1,
                metavar=kind.__name__.upper(),
                instance_from_str=lambda words: parse(words[0]),
                is_instance=lambda value: isinstance(value, kind),
                str_from_instance=lambda value: [str(value)],
            )

    rule_of(int, parse_int)
    rule_of(float, parse_float)
    return registry


def _recipe_defaults(argv: Sequence[str]) -> dict[str, Any]:
    """The values that --help shows: those of the recipe on the command line, where it names one."""
    shown = defaults()
    names = {recipe.name for recipe in list_recipes()}
    for word in argv:
        if word in names or (word.endswith(".toml") and wrong_path(word) is None and Path(word).is_file()):
            return merge(shown, load_recipe(word))
    return shown


def _run_config(options: Any) -> RunConfig:
    """Of `run` and `launch`. That a run is going on in the folder is told at once, before torch is imported."""
    overrides = as_overrides(options.overrides)
    if options.resume is not None:
        return _resumed_config(options, overrides)
    if options.recipe is None:
        raise ConfigError(
            "a recipe is needed",
            allowed=", ".join([*(recipe.name for recipe in list_recipes()), "the path of a .toml file"]),
            hint="try `slipstream run quickstart`",
        )
    config = resolve(options.recipe, overrides, options.preset)
    from slipstream.stages.named import check_named

    check_named(config)
    if options.out is not None:
        check_free(options.out)
    return config


def _resumed_config(options: Any, overrides: Mapping[str, Any]) -> RunConfig:
    """The configuration that the run saved, but for what may change: a resumed run is the same run."""
    if refused := [flag for flag in ("recipe", "preset", "out") if getattr(options, flag) is not None]:
        raise ConfigError(
            "a resumed run keeps its configuration",
            got=", ".join(refused),
            allowed=f"--resume alone, or with {', '.join(RESUMED_WITH)}",
        )
    config = resumed_config(options.resume, overrides)
    check_free(options.resume)
    return config


def _eval_config(options: Any) -> tuple[Path, RunConfig]:
    """The checkpoint to load and the configuration to evaluate it under."""
    if options.model is None:
        raise ConfigError("a model is needed", allowed="folder of a run, or of a Hugging Face checkpoint, or a hub id")
    from slipstream.evals.target import eval_target

    return eval_target(
        options.model,
        recipe=options.recipe,
        overrides=as_overrides(options.overrides),
        tell=partial(_console.print, highlight=False, markup=False, soft_wrap=True),
    )


def _print_help() -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for name, command in COMMANDS.items():
        table.add_row(f"[bold]{name}[/bold]", command.__doc__)
    _console.print("usage: slipstream COMMAND ...\n\nAsynchronous reinforcement learning for language models.\n")
    _console.print(table)
    _console.print("\nStart with `slipstream run quickstart`; every command has --help.")


def _print_error(error: SlipstreamError) -> None:
    from slipstream.observe.display import printable  # an error may quote a data set or a model

    first, *rest = (printable(line, limit=_MAX_ERROR_LINE) for line in str(error).split("\n"))
    _errors.print(Text.assemble(("error: ", "bold red"), (first, "bold")), soft_wrap=True)
    for line in rest:
        _errors.print(Text(line), soft_wrap=True)


def script() -> NoReturn:
    """The process `slipstream`: `main`, and an end that no thread can spoil.

    A daemon thread that comes back from C++ (a wait for the store, for gloo) while Python takes itself apart aborts the
    process. Where one is left, nothing is taken apart.
    """
    for descriptor in range(3):  # one that was closed would be given to the next file, and written to
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = main()
    for number in SIGNALS:  # the command has ended: all that is left is Python's own end
        signal.signal(number, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    script()
