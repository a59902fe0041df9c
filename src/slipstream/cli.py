"""The command line: `slipstream COMMAND`, one of `COMMANDS`.

Exit codes: 0 done, 1 the run failed, 2 bad input (nothing was started), 130 interrupted by Ctrl-C, 143 by SIGTERM, 129
by SIGHUP. Errors go to stderr without a traceback. torch and transformers are imported inside the commands that
compute, after their input was checked.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from slipstream.core.config import RunConfig
from slipstream.core.disk import replace_file
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.fields import Precision
from slipstream.core.interrupts import SIGNALS, Interrupted, Interrupts, in_words
from slipstream.core.plain import shortened, wrong_path, wrong_text
from slipstream.core.recipes import (
    RESUMED_WITH,
    changed_since,
    check_path,
    defaults,
    list_recipes,
    load_recipe,
    merge,
    read_toml,
    recipes_dir,
    resolve,
    resumed_config,
)
from slipstream.core.run_lock import check_free
from slipstream.core.scratch import temporary_directory
from slipstream.flags import REQUIRED, WithFields, as_flags, flag, parse

if TYPE_CHECKING:
    from slipstream.launch import Job

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130

_console = Console()
_errors = Console(stderr=True)
SILENT_S = 3.0  # after which a command says what it is at
_MAX_ERROR_LINE = 4000


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
        raise ConfigError.unknown(
            f"unknown command '{name}'", name, COMMANDS, hint="a command comes first: `slipstream run RECIPE ...`"
        )
    return COMMANDS[name]


def _exit_code(work: Callable[[], int]) -> int:
    """Return what `work` returns, or the exit code of the error that it raises, and print that error."""
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
    except PermissionError as error:  # of a path that a command was given, or one below it
        _print_error(ConfigError("this may not be read or written", got=f"{error.strerror}: {error.filename}"))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT
        _errors.print(in_words(number), style="yellow")
        return 128 + number


@dataclass(frozen=True, kw_only=True)
class RunOptions(WithFields):
    """Flags of `slipstream run`."""

    recipe: str | None = flag(
        "Name of a shipped recipe (`slipstream recipes`), or the path of a .toml file.", is_positional=True
    )
    preset: str | None = flag("How asynchronous to be: sync, one_step, bounded, continuous, tolerant.")
    out: Path | None = flag("Folder of the run, new or empty. Default: runs/RECIPE-TIME.")
    resume: Path | None = flag(
        "Folder of a run to go on with, from its last checkpoint; with --steps N also of one that is done."
    )


def run_command(argv: Sequence[str]) -> int:
    """Train a model by a recipe; any field of the configuration is a flag."""
    options = parse(RunOptions, argv, run_command, shown=_shown_of_recipe)
    return _train(_run_config(options), options)


def _train(config: RunConfig, options: RunOptions, **more: Any) -> int:
    """Run, and return the run's exit code, whatever becomes of the terminal."""
    from slipstream.api import run
    from slipstream.observe.outlet import lasting_output

    if options.resume is not None and options.overrides:
        more["overrides"] = options.overrides

    def train() -> int:
        given = None if options.resume is not None else config  # what goes on has its own
        result = run(given, out=options.out, resume=options.resume, **more)
        return {"done": EXIT_DONE, "interrupted": EXIT_INTERRUPTED}.get(result.summary["status"], EXIT_FAILED)

    with lasting_output():
        return _exit_code(train)


def _run_config(options: RunOptions) -> RunConfig:
    """Return the configuration for `run` and `launch`; a folder in which a run goes on is refused before torch is
    imported."""
    if options.resume is not None:
        if refused := [flag for flag in ("recipe", "preset", "out") if vars(options)[flag] is not None]:
            allowed = f"--resume alone, or with {', '.join(RESUMED_WITH)}"
            raise ConfigError("a resumed run keeps its configuration", got=", ".join(refused), allowed=allowed)
        config = resumed_config(options.resume, options.overrides)
        check_free(options.resume)
        return config
    if options.recipe is None:
        raise ConfigError(
            "a recipe is needed",
            allowed=", ".join([*(recipe.name for recipe in list_recipes()), "the path of a .toml file"]),
            hint="try `slipstream run quickstart`",
        )
    config = resolve(options.recipe, options.overrides, options.preset)
    from slipstream.stages.named import check_named

    check_named(config)
    if options.out is not None:
        check_free(options.out)
    return config


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(RunOptions):
    """Flags of `slipstream launch`. Those of `run` are for the controller and for job files."""

    group: str | None = flag(
        "What this machine is: controller, trainer, generator-0, generator-1 ..., or a group of --remote."
    )
    join: bool = flag("With --group generator: join a running run, under a free number.", default=False)
    listen: str | None = flag("Controller: HOST:PORT where groups reach it. Default: 127.0.0.1:0.")
    address_file: Path | None = flag("Controller: file for the HOST:PORT it listens at.")
    remote: tuple[str, ...] | None = flag(
        "Controller, job files: groups that join, too: reward_models, reference, teacher, critic. Default: none; in "
        "job files those on CUDA."
    )
    controller: str | None = flag("Group: HOST:PORT of the controller, or the file with that.")
    join_timeout: float | None = flag("Controller, group: seconds to wait for the others to come. Default: 600.")
    key_file: Path | None = flag("The run's key, mode 0600; the controller makes it. Default: SLIPSTREAM_RUN_KEY.")
    address: str | None = flag("Group: address where the others reach this machine. Default: 127.0.0.1.")
    nnodes: int | None = flag("Group: machines that it is on. Default: 1.")
    node_rank: int | None = flag("Group: which of them this is. Default: 0.")
    rendezvous: str | None = flag("Group on several machines: HOST:PORT on machine 0, where they meet.")
    threads: int | None = flag("Group: compute threads per process. Default: the machine's cores, divided.")
    slurm: Path | None = flag("Folder for the files of SLURM jobs; nothing is started.")
    kubernetes: Path | None = flag("Folder for Kubernetes manifests; nothing is started.")
    skypilot: Path | None = flag("Folder for a job group of SkyPilot; nothing is started.")
    ray: str | None = flag("Address of a Ray cluster that the run goes on: auto, or HOST:PORT.")
    gpus_per_node: int = flag("Job files, Ray: GPUs of a machine.", default=8)
    partition: str | None = flag("SLURM: partition.")
    account: str | None = flag("SLURM: account.")
    time: str = flag("SLURM: time limit.", default="24:00:00")
    image: str | None = flag("Kubernetes, SkyPilot: container image with Slipstream installed.")
    namespace: str | None = flag("Kubernetes: namespace. Default: kubectl's present one.")
    accelerator: str | None = flag("SkyPilot: its name of a machine's GPUs, as H100.")
    infra: str | None = flag("SkyPilot: where it looks for machines, as kubernetes. Default: anywhere.")


def launch_command(argv: Sequence[str]) -> int:
    """Run on several machines: be the controller, be a group that joins it, or write the job files for both."""
    options = parse(LaunchOptions, argv, launch_command, shown=_shown_of_recipe)
    files = [name for name in ("slurm", "kubernetes", "skypilot") if getattr(options, name) is not None]
    if len(files) + (options.group is not None) + (options.ray is not None) != 1:
        allowed = "--group NAME, --ray ADDRESS, or --slurm, --kubernetes or --skypilot DIR"
        raise ConfigError("launch does one thing", allowed=allowed)
    if files:
        from slipstream.jobs.files import write_job_files

        _say(write_job_files(_run_config(options), options, files[0]))
        return EXIT_DONE
    if options.ray is not None:
        return _exit_code(lambda: _on_ray(_run_config(options), options))
    from slipstream.controller.pipeline import CONTROLLER
    from slipstream.launch import JOINS, cluster_of, join

    if options.group == CONTROLLER:
        if options.join:
            raise ConfigError("the controller joins nothing", got="--join with --group controller", allowed=JOINS)
        options = _of_its_recipe(options)
        config = _run_config(options)
        listen, remote = options.listen or "127.0.0.1:0", options.remote or ()
        waits = {} if options.join_timeout is None else {"join_timeout": options.join_timeout}
        cluster = cluster_of(listen, options.key_file, options.address_file, remote, **waits)
        return _train(config, options, cluster=cluster)
    join(_job(options))
    return EXIT_DONE


def _of_its_recipe(options: LaunchOptions) -> LaunchOptions:
    """Return `options` of a controller with fields of their recipe in its place, where the run in --resume is of that.

    Job files say both: the recipe may have been edited since.
    """
    if options.recipe is None or options.resume is None:
        return options
    changes = changed_since(options.resume, resolve(options.recipe))
    return dataclasses.replace(options, recipe=None, overrides=merge(changes, options.overrides))


def _on_ray(config: RunConfig, options: LaunchOptions) -> int:
    from slipstream.jobs.on_ray import run_on_ray
    from slipstream.stages.run_folder import new_run_dir

    assert options.ray is not None, "launch_command asks"
    out = options.resume or new_run_dir(config.recipe, options.out)
    return run_on_ray(
        config,
        options.ray,
        out,
        resumed_with=None if options.resume is None else as_flags(options.overrides),
        remote=options.remote,
        gpus_per_node=options.gpus_per_node,
        say=_say,
    )


def _job(options: LaunchOptions) -> Job:
    """Return how the group of `options` joins; of the run's fields it takes a few, and --steps with --out alone."""
    from slipstream.launch import Job

    names = [field.name for field in dataclasses.fields(Job)]
    if (options.out is None) != ("steps" not in options.overrides):
        names = [name for name in names if name not in ("out", "steps")]
    if options.remote is not None:
        raise ConfigError("the controller is told which groups join it", got=f"--remote with --group {options.group}")
    of_runs = [name for name in ("recipe", "preset", "out", "resume") if vars(options)[name] is not None]
    if not_ours := [name for name in (*of_runs, *options.overrides) if name not in names]:
        raise ConfigError(
            "a group takes its configuration from the controller",
            got=f"{', '.join(not_ours)} with --group {options.group}",
            allowed="what `slipstream launch --help` calls a group's, --max-restarts, --shutdown-grace-s, and --out"
            " with --steps",
            hint="give it to the controller's command",
        )
    if options.controller is None:
        raise ConfigError("a group joins a controller", allowed="--controller HOST:PORT, or the file with that")
    check_path(options.controller, "--controller")
    given = {name: value for name, value in (vars(options) | options.overrides).items() if name in names}
    return Job(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class EvalOptions(WithFields):
    """Flags of `slipstream eval`."""

    model: Path | None = flag(
        "Folder of a run, or a Hugging Face checkpoint: folder or hub id (then --recipe says on what).",
        is_positional=True,
    )
    recipe: str | None = flag("Recipe whose prompts and rewards to use. Default: the run's own configuration.")
    data: str | None = flag(
        "Data set to answer in place of the held-out prompts: file, folder or hub id, with the columns of the recipe."
    )
    set: str | None = flag("Name of a set of eval.sets. Default: the first of them.", metavar="NAME")
    num_prompts: int | None = flag("Prompts to answer. Default: eval.num_prompts; with --data, or of a set, all.")
    num_samples: int | None = flag("Sampled answers per prompt, for pass@k. Default: 1, or the set's.")
    out: Path | None = flag("File for the answers, one JSON object a line. Default: none.")


def eval_command(argv: Sequence[str]) -> int:
    """Measure a model on held-out prompts, greedy and sampled: mean reward, and accuracy by `eval.measure`."""
    options = parse(EvalOptions, argv, eval_command, shown=_shown_of_recipe)
    if options.out is not None:
        is_writable = options.out.parent.is_dir() and os.access(options.out.parent, os.W_OK)
        if options.out.is_dir() or not is_writable:
            allowed = "a file in an existing folder that may be written to"
            raise ConfigError("the answers cannot be written there", got=options.out, allowed=allowed)
    model, config = _eval_config(options)
    from slipstream.evals.evaluate import evaluate, write_answers
    from slipstream.evals.table import show

    result = evaluate(
        config,
        num_prompts=options.num_prompts,
        num_samples=options.num_samples,
        is_whole=options.data is not None,
        eval_set=options.set,
    )
    show(result, model, _console)
    if options.out is not None:
        write_answers(result, options.out)
        _say(f"answers: {options.out}")
    return EXIT_DONE


def _eval_config(options: EvalOptions) -> tuple[Path, RunConfig]:
    """Return the checkpoint to load and the configuration to evaluate it under."""
    if options.model is None:
        raise ConfigError("a model is needed", allowed="folder of a run, or of a Hugging Face checkpoint, or a hub id")
    from slipstream.environments.checks import check_environments
    from slipstream.evals.target import eval_target

    model, config = eval_target(
        options.model,
        recipe=options.recipe,
        overrides=options.overrides,
        data=options.data,
        num_prompts=options.num_prompts,
        tell=_say,
    )
    check_environments(config, None)
    return model, config


@dataclass(frozen=True)
class ExportOptions:
    """Flags of `slipstream export`."""

    model: str | None = flag(
        "Folder of a finished run or an adapter, or a Hugging Face checkpoint: folder or hub id.", is_positional=True
    )
    out: str | None = flag("New folder to write to.", is_positional=True)
    merged: bool = flag("Write a model that has its adapters in its weights, for programs without.", default=False)
    push_to_hub: str | None = flag(
        "Upload it as well, to the repository ORG/NAME of the Hugging Face hub, with the token of `hf auth login` or"
        " HF_TOKEN.",
        metavar="ORG/NAME",
    )
    private: bool = flag("Make that repository a private one.", default=False)


def export_command(argv: Sequence[str]) -> int:
    """Write a run's model to a folder of its own, or its adapters, or with --merged a model of both."""
    options = parse(ExportOptions, argv, export_command)
    if options.model is None or options.out is None:
        raise ConfigError("a model and a folder are needed", allowed="slipstream export RUN FOLDER")
    check_path(options.model, "'model'")
    from slipstream.evals.exported import export

    to_hub = partial(export, push_to_hub=options.push_to_hub, private=options.private, tell=_say)
    _say(f"written: {to_hub(options.model, options.out, merge=options.merged)}")
    return EXIT_DONE


@dataclass(frozen=True)
class ReportOptions:
    """Flags of `slipstream report`."""

    runs: tuple[Path, ...] = flag(
        "Folder of a run; folders of several to compare them.", default=REQUIRED, is_positional=True
    )
    out: Path | None = flag(
        "File for the page. Default: report.html in the run's folder; of several, comparison.html in this one."
    )


def report_command(argv: Sequence[str]) -> int:
    """Write a page about a run from its files, or about several beside each other, and say where it is."""
    options = parse(ReportOptions, argv, report_command)
    from slipstream.observe.report import report

    _say(f"report: {report(*options.runs, out=options.out)}")
    return EXIT_DONE


@dataclass(frozen=True)
class WatchOptions:
    """Flags of `slipstream watch`."""

    run: Path = flag("Folder of a run, which need not have begun.", default=REQUIRED, is_positional=True)
    port: int = flag("Port on loopback; 0 takes one that is free.", default=7878)
    open: bool = flag("Open it in the default browser.", default=False)


def watch_command(argv: Sequence[str]) -> int:
    """Show a run in the browser, live while it goes on and with a time slider afterwards, until Ctrl-C."""
    options = parse(WatchOptions, argv, watch_command)
    from slipstream.observe.watch import watch

    with watch(options.run, port=options.port, open_browser=options.open) as page:
        what = f"watching {options.run}" if options.run.exists() else f"waiting for a run in {options.run}"
        _say(f"{what} at {page.url} (Ctrl-C ends it)")
        page.wait()
    return EXIT_DONE


@dataclass(frozen=True)
class ServeOptions:
    """Flags of `slipstream serve`."""

    model: str | None = flag(
        "Folder of a finished run, or a Hugging Face checkpoint: folder or hub id.", is_positional=True
    )
    host: str = flag("Address to listen at; another than loopback's needs --api-key.", default="127.0.0.1")
    port: int = flag("Port; 0 takes one that is free.", default=8000)
    api_key: str | None = flag("Environment variable with the key that clients must send. Default: none is asked for.")
    slots: int = flag("Requests that are decoded together.", default=16)
    max_len: int | None = flag("Tokens of context and answer. Default: what the model has room for, at most 2048.")
    max_waiting: int = flag("Requests that wait for a slot; the next one is refused with status 429.", default=256)
    name: str | None = flag("Name that clients see. Default: the run's folder, the checkpoint's, or the hub id.")
    template: str | None = flag(
        "Template of each message, as '{role}: {content}', in place of the model's chat template. Default where the"
        " model has none: prompts.template of its run where it has one place, else '{content}'."
    )
    chat_template_kwargs: str | None = flag(
        "JSON of further variables of the chat template, as '{\"enable_thinking\": false}'. Default: those of the run."
    )
    tool_format: str = flag(
        "How the model writes calls of tools: auto, hermes, llama3, smollm, json_tags.", default="auto"
    )


def serve_command(argv: Sequence[str]) -> int:
    """Serve a model in OpenAI's form, for evaluation harnesses and scripts, until Ctrl-C."""
    options = vars(parse(ServeOptions, argv, serve_command)).copy()
    model, api_key_env = options.pop("model"), options.pop("api_key")
    if model is None:
        raise ConfigError("a model is needed", allowed="folder of a run, or of a Hugging Face checkpoint, or a hub id")
    check_path(model, "'model'")
    if (text := options["chat_template_kwargs"]) is not None:
        options["chat_template_kwargs"] = _json_table(text)
    from slipstream.evals.serve import serve

    try:
        with serve(model, api_key_env=api_key_env, tell=_say, **options) as served:
            chats = "the model's chat template" if served.template is None else f"the template {served.template!r}"
            _say(f"serving {served.name} at {served.base_url} (chats by {chats}; Ctrl-C ends it)")
            served.wait()
    finally:
        gc.freeze()  # the end of the process would look through all that torch has imported, for seconds
    return EXIT_DONE


def _json_table(text: str) -> dict[str, Any]:
    """Return the flat object in `text`. ConfigError where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(one, bool | int | float | str) for one in found.values()):
        allowed = 'a JSON object of truth values, numbers and texts, as {"enable_thinking": false}'
        raise ConfigError("--chat-template-kwargs is no table", got=shortened(text, 60), allowed=allowed)
    return found


@dataclass(frozen=True)
class ReplayOptions:
    """Flags of `slipstream replay`."""

    path: Path = flag(
        "Folder of a run, or of an attempt_<n> in it, or an events.jsonl.", default=REQUIRED, is_positional=True
    )


def replay_command(argv: Sequence[str]) -> int:
    """Run a run's recorded events through the schedule again; the first line that it would decide otherwise."""
    options = parse(ReplayOptions, argv, replay_command)
    from slipstream.controller.replay import replay
    from slipstream.controller.replay_table import show

    started_s = time.perf_counter()
    found = replay(options.path)
    show(found, time.perf_counter() - started_s, _console)
    return EXIT_DONE if found.is_sound and found.is_complete else EXIT_FAILED


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(WithFields):
    """Flags of `slipstream simulate`."""

    run: Path | None = flag("Folder of a finished run.", is_positional=True)
    preset: str | None = flag("How asynchronous to be: sync, one_step, bounded, continuous, tolerant.")
    generators: int | None = flag("The same as --generator.replicas.")
    slots: int | None = flag("The same as --generator.num-slots.")
    reward_s: float | None = flag("Seconds that the reward takes for a completion. Default: as in the run.")
    turns: float | None = flag("Turns of an episode, in the mean. Default: as in the run.")
    given_tokens: int | None = flag("Tokens that an environment gives between two turns. Default: as in the run.")
    environment_s: float | None = flag("Seconds of an environment's answer, in the mean, with a heavy tail.")
    sessions: int | None = flag("Episodes that a replica has open. Default: as in the run.")
    beside: tuple[Path, ...] | None = flag("More runs of this model on this machine, to calibrate by.")
    events: Path | None = flag("File for the decisions of the changed run, as `slipstream replay` takes them.")
    seeds: int = flag("Simulations of each run, whose mean is told.", default=3)
    json: bool = flag("Print JSON.", default=False)


def simulate_command(argv: Sequence[str]) -> int:
    """Predict a finished run with other dials from its own files: step time, who waits, staleness."""
    from slipstream.plan.what_if import DIALS

    options = parse(SimulateOptions, argv, simulate_command, shown=_shown_of_run, only=DIALS)
    if options.run is None:
        raise ConfigError("a run is needed", allowed="the folder of a finished run", hint="`slipstream run` makes one")
    from slipstream.plan.lengths import Turns
    from slipstream.plan.what_if import show, what_if

    short = {"replicas": options.generators, "num_slots": options.slots}
    given = {name: value for name, value in short.items() if value is not None}
    found = what_if(
        [options.run, *(options.beside or ())],
        merge(options.overrides, {"generator": given} if given else {}),
        preset=options.preset,
        reward_s=options.reward_s,
        turns=Turns(turns=options.turns, given_tokens=options.given_tokens, environment_s=options.environment_s),
        sessions=options.sessions,
        seeds=options.seeds,
        events=options.events,
    )
    _print_json_or(found, options.json, show)
    return EXIT_DONE


@dataclass(frozen=True)
class PlanOptions:
    """Flags of `slipstream plan`; for what is left out the recipe or the run has a value, or a default is printed."""

    model: str | None = flag(
        "A published model by name, a Hugging Face folder or config.json, a recipe, or the folder of a run.",
        is_positional=True,
    )
    gpus: int | None = flag("How many GPUs there are.")
    gpu: str | None = flag("Which: a100, h100, h200, b200.")
    gpus_per_node: int | None = flag("GPUs of a node, which NVLink joins.")
    network: float | None = flag("Between nodes: GB/s for each GPU, one way.")
    cluster: Path | None = flag("TOML file with all of that, for GPUs that are not known by name.")
    price: float | None = flag("US dollars for an hour of one GPU.")
    measured: Path | None = flag(
        "Measured curves (in a checkout: benchmarks/eta_curves.py), no hardware table; without --gpus: of this CPU."
    )
    prompt_tokens: float | None = flag("Mean length of a prompt.")
    completion_tokens: float | None = flag("Mean length of a completion.")
    p99_tokens: float | None = flag("What one completion in a hundred exceeds.")
    max_new_tokens: int | None = flag("The longest completion there is room for.")
    lengths: Path | None = flag("Folder of a run: its completions' lengths.")
    groups_per_step: int | None = flag("Prompts of a step.")
    completions_per_group: int | None = flag("Completions of a prompt.")
    precision: tuple[Precision, ...] | None = flag(
        "Of the generators: those to be tried.", metavar="float32|bfloat16|fp8 ..."
    )
    max_staleness: int | None = flag("Largest bound to be tried, in steps.")
    max_stages: int | None = flag("Most pipeline stages to be tried; 1: none. Default: 16.")
    reference: bool = flag("There is a reference policy, for a KL penalty.", default=False)
    critic: bool = flag("There is a critic of the policy's size.", default=False)
    reward_model: str | None = flag("The model that scores, named as the policy is.")
    lora_rank: int | None = flag("Rank of adapters that are trained in place of the model's own weights.")
    turns: float | None = flag("Turns of an episode, in the mean; lengths are then of all its sampled tokens.")
    given_tokens: int | None = flag("Tokens that an environment gives between two turns.")
    environment_s: float | None = flag("Seconds of an environment's answer, in the mean, with a heavy tail.")
    sessions: int | None = flag("Episodes that a replica has open. Default: twice its rows.")
    rows: int = flag("Configurations in the table.", default=3)
    json: bool = flag("Print JSON.", default=False)
    out: Path | None = flag("Write the best configuration as a recipe.")


def plan_command(argv: Sequence[str]) -> int:
    """Split GPUs over trainer and generators: the best configurations, what a step takes and costs, and why."""
    options = vars(parse(PlanOptions, argv, plan_command)).copy()
    as_json, out = options.pop("json"), options.pop("out")
    if options["model"] is None:
        allowed = "a name (llama-3.1-8b), a Hugging Face folder or config.json, a recipe, the folder of a run"
        raise ConfigError("a model is needed", allowed=allowed, hint="try `slipstream plan llama-3.1-8b --gpus 16`")
    from slipstream.plan.answer import answer, check_writable, show
    from slipstream.plan.question import Question

    if out is not None:
        check_writable(out)
    told = threading.Timer(SILENT_S, _errors.print, ["planning: divisions are compared and the best rehearsed ..."])
    told.daemon = True
    told.start()
    try:
        found = answer(Question(**options))
    finally:
        told.cancel()
    _print_json_or(found, as_json, show)
    if out is not None:
        found.write_recipe(out)
        _errors.print(f"recipe: {out}", highlight=False, soft_wrap=True)
    return EXIT_DONE


@dataclass(frozen=True)
class ImportOptions:
    """Flags of `slipstream import-config`."""

    file: Path = flag(
        "YAML or JSON file as `trl grpo --config` takes: GRPOConfig, ModelConfig, the script's arguments.",
        default=REQUIRED,
        is_positional=True,
    )
    out: Path | None = flag("File NAME.toml for the recipe. Default: it is printed.")
    world: int = flag("Processes that TRL is started with, as accelerate's --num_processes.", default=1)
    rows: int | None = flag("Prompts in the data set: num_train_epochs becomes steps.")


def import_config_command(argv: Sequence[str]) -> int:
    """Convert the arguments of TRL's GRPOTrainer to a recipe, and say what is left to do."""
    options = parse(ImportOptions, argv, import_config_command)
    from slipstream.core.imported import import_config, told
    from slipstream.plan.answer import check_writable

    if options.out is not None:
        check_writable(options.out)
    found = import_config(options.file, world=options.world, rows=options.rows)
    for kind, line in told(found.notes):
        _errors.print(Text(line, "" if kind == "unused" else "yellow"), soft_wrap=True)
    if options.out is None:
        _console.out(found.toml, highlight=False, end="")
    else:
        replace_file(options.out, found.toml.encode())
        _say(f"recipe: {options.out}")
    return EXIT_DONE


@dataclass(frozen=True)
class RecipesOptions:
    """Flags of `slipstream recipes`."""

    tasks: bool = flag("List the reasoning-gym tasks instead.", default=False)


def recipes_command(argv: Sequence[str]) -> int:
    """List the shipped recipes, or the reasoning-gym tasks they can be built from."""
    options = parse(RecipesOptions, argv, recipes_command)
    if options.tasks:
        from slipstream.prompts.tasks import task_names

        _say("\n".join(task_names()))
        return EXIT_DONE
    table = Table("recipe", Column("what it does", overflow="fold"), show_edge=False)
    for recipe in list_recipes():
        needs = f"\nneeds {', '.join(recipe.needs)}" if recipe.needs else ""
        table.add_row(recipe.name, Text.assemble(recipe.description, (needs, "yellow")))
    _console.print(table)
    _say(
        "\nStart one with `slipstream run RECIPE`. What it needs of the Hugging Face hub is downloaded then, or before"
        "\nwith `hf download NAME` (NAME@REV: `--revision REV`; data: `--repo-type dataset`). Files are yours to make,"
        "\nas the recipe's text says."
        f"\nFiles: {recipes_dir()}"
    )
    return EXIT_DONE


@dataclass(frozen=True)
class DoctorOptions:
    """Flags of `slipstream doctor`."""

    json: bool = flag("Print JSON.", default=False)


def doctor_command(argv: Sequence[str]) -> int:
    """Say what this machine has, and what of Slipstream works on it."""
    options = parse(DoctorOptions, argv, doctor_command)
    temporary_directory()  # torch asks for it, too, and has no words for it
    from slipstream.doctor import examine, render

    _print_json_or(examine(), options.json, render)
    return EXIT_DONE


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": run_command,
    "launch": launch_command,
    "eval": eval_command,
    "export": export_command,
    "report": report_command,
    "watch": watch_command,
    "serve": serve_command,
    "replay": replay_command,
    "simulate": simulate_command,
    "plan": plan_command,
    "import-config": import_config_command,
    "recipes": recipes_command,
    "doctor": doctor_command,
}


def _shown_of_recipe(argv: Sequence[str]) -> dict[str, Any]:
    """Return the values that --help shows: those of the recipe on the command line, where it names one."""
    names = {recipe.name for recipe in list_recipes()}
    for word in argv:
        if word in names or (word.endswith(".toml") and wrong_path(word) is None and Path(word).is_file()):
            return merge(defaults(), load_recipe(word))
    return defaults()


def _shown_of_run(argv: Sequence[str]) -> dict[str, Any]:
    """Return the values that --help shows: those of the run on the command line, where it names one."""
    folders = (Path(word) for word in argv if wrong_path(word) is None)
    folder = next((folder for folder in folders if (folder / "config.toml").is_file()), None)
    return defaults() if folder is None else merge(defaults(), read_toml(folder / "config.toml"))


def _say(text: str, style: str = "") -> None:
    """Print `text` as it is: without markup, colours of numbers, or line breaks of the console's."""
    _console.print(Text(text, style), soft_wrap=True)


def _print_json_or(found: Any, as_json: bool, show: Callable[[Any, Console], None]) -> None:
    if as_json:
        _console.print_json(data=found.to_dict())
    else:
        show(found, _console)


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
    """Run the process `slipstream`: `main`, and an end that no thread can spoil.

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
