"""The stage `rl`: one run of the pipeline under its controller, from the start or from a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import sleep
from typing import Any

import msgspec

from slipstream.controller.build import build_work, default_pipeline
from slipstream.controller.callbacks import Callbacks
from slipstream.controller.checks import check_room
from slipstream.controller.controller import Controller
from slipstream.controller.ledger import Cut, check_fits, read_cut
from slipstream.controller.meeting import Cluster
from slipstream.controller.observers import Observers, Screen
from slipstream.controller.pipeline import Pipeline, RunInput
from slipstream.controller.policies import schedule_for
from slipstream.controller.restarts import Restarts
from slipstream.controller.tally import Tally
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.disk import HeldFolder
from slipstream.core.errors import CheckpointError, ConfigError, DiskError, ExecutorLost, SlipstreamError, reason
from slipstream.core.files import open_regular
from slipstream.core.hooks import Hooks, load_callbacks
from slipstream.core.interrupts import GO_ON_VARIABLE, Interrupted, Interrupts
from slipstream.core.jsonl import read_jsonl
from slipstream.core.plain import plural
from slipstream.core.recipes import policy_flags, resolve, save_config, with_stage_paths
from slipstream.core.run_log import Snapshot
from slipstream.core.staleness import oldest_version, place_of
from slipstream.core.unfinished_messages import Unfinished
from slipstream.environments.build import missing_end
from slipstream.environments.checks import Given
from slipstream.environments.rehearsal import Rehearsal
from slipstream.models.build import build_tokenizer
from slipstream.models.hub import with_folders
from slipstream.models.preflight import check_policy
from slipstream.observe.chrome_trace import merge_timelines
from slipstream.observe.evaluation import EVALUATION_FILE
from slipstream.observe.hardware import describe
from slipstream.observe.metrics import flatten
from slipstream.observe.samples import drop_after
from slipstream.observe.summary import Data, Summary, read_summary, write_summary
from slipstream.observe.trackers import Trackers, open_trackers
from slipstream.prompts import PromptReport, PromptSet, task_table
from slipstream.prompts.streamed import StreamedPrompts
from slipstream.rewards.checks import check_answers
from slipstream.rewards.dry_call import dry_call
from slipstream.rewards.given import Functions
from slipstream.stages.progress import told_of, watch
from slipstream.stages.resume import FILES, Resumed, prepare_resume
from slipstream.stages.run_folder import check_goes_on, is_rl_done
from slipstream.trainer.checkpoint import policy_shapes
from slipstream.trainer.checkpoint_folder import FORMATS, Found, newest_first, newest_whole, read_manifest
from slipstream.trainer.optim import lr_factor

ENDED = ("done", "interrupted")  # as the controller leaves a run that it has saved
QUICK_BYTES = 1 << 25  # of decisions and timelines: what is read in a second or two
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FromPython:
    """The arguments of a run besides its configuration."""

    functions: Functions = field(default_factory=dict)  # of the rewards, by the names that the configuration has
    environments: Given | None = None
    display: bool = True
    pipeline: Callable[[RunConfig], Pipeline] | None = None
    cluster: Cluster | None = None
    interrupts: Interrupts = field(default_factory=Interrupts)
    hooks: Hooks = field(default_factory=dict)

    @property
    def remote(self) -> frozenset[str]:
        """The groups that run on other machines."""
        return frozenset() if self.cluster is None else self.cluster.remote

    def how_to_go_on(self, run_dir: Path) -> str:
        """Return a line with the command, or the call, that goes on with the run in `run_dir`."""
        has_saved = bool(newest_first(run_dir / "checkpoints"))
        return f"{'go on' if has_saved else 'nothing is saved yet: begin it again'} with: {self.resume_call(run_dir)}"

    def resume_call(self, run_dir: Path) -> str:
        """Return the command, or the call, that goes on with the run in `run_dir`."""
        return self.other_call(run_dir) or f"slipstream run --resume {shlex.quote(str(run_dir))}"

    def other_call(self, run_dir: Path) -> str | None:
        """Return the command, or the call, that goes on with a run with which `slipstream run --resume` cannot."""
        handed: tuple[tuple[str, object], ...] = (
            ("reward", self.functions),
            ("environment", self.environments),
            ("callbacks", any(self.hooks.values())),
            ("pipeline", self.pipeline),
        )
        same = [name for name, one in handed if one]
        if same:
            return f"slipstream.run(resume={str(run_dir)!r}, ...) with the same {' and '.join(same)}"
        if self.cluster is not None and GO_ON_VARIABLE in os.environ:
            return os.environ[GO_ON_VARIABLE]
        if self.cluster is not None:
            folder = shlex.quote(str(run_dir))
            return f"slipstream launch --group controller --resume {folder}, with the other flags as before"
        return None


def run_rl(
    config: RunConfig,
    run_dir: Path,
    given: FromPython,
    *,
    resumed: Resumed | None = None,
    prepared: tuple[RunInput, PromptSet] | None = None,
) -> dict[str, Any]:
    """Train in `run_dir`, from where it was `resumed`; returns what `summary.json` says.

    `config` is saved as it is; 'stage:...' in it stands for folders under `run_dir`. An attempt that loses an executor
    without which it cannot go on (ExecutorLost: trainer, reference, reward models) is followed by another one, from the
    last checkpoint: `max_restarts` times for each executor, after a pause that doubles. Errors that an executor reports
    end the run. Interrupts end it also in a pause. `prepared` is what the first attempt starts with,
    where it has been made; else ConfigError for bad data, before anything is written.
    """
    callbacks = Callbacks(load_callbacks(config, given.hooks), config.callbacks.timeout_s)
    with contextlib.closing(callbacks):  # made once: what waits to be called, and 'stop', outlive an attempt
        return _attempts(config, run_dir, given, resumed, prepared, callbacks)


def _attempts(
    config: RunConfig,
    run_dir: Path,
    given: FromPython,
    resumed: Resumed | None,
    prepared: tuple[RunInput, PromptSet] | None,
    callbacks: Callbacks,
) -> dict[str, Any]:
    restarts = Restarts(config.max_restarts, WallClock())
    while True:
        try:
            return _attempt(config, run_dir, given, restarts, resumed, prepared, callbacks)
        except ExecutorLost as error:
            if callbacks.error is not None:
                raise callbacks.error from error
            pause_s = restarts.plan(error.executor)
            if pause_s is None:
                raise
            what, executor = error.what, error.executor  # not the error: its traceback holds all of that attempt
        try:
            given.interrupts.check()  # it was to end, and lost an executor on the way
            sleep(pause_s)
            resumed, prepared = prepare_resume(run_dir, _newest_checkpoint(run_dir)), None
        except KeyboardInterrupt:
            _mark_interrupted(run_dir)
            tell(config, given, [given.how_to_go_on(run_dir)])
            _draw_the_lost(run_dir)
            raise
        except SlipstreamError:  # all checkpoints are damaged, or the disk is full
            _draw_the_lost(run_dir)
            raise
        count = f"{restarts.counts[executor]} of {config.max_restarts}"
        tell(config, given, [f"{what}: the run is started again ({count}), after {pause_s:g} s", *resumed.notes])


def _draw_the_lost(run_dir: Path) -> None:
    """Draw an attempt that was to be followed by another, as far as the disk has room."""
    with contextlib.suppress(DiskError):
        merge_timelines(run_dir)
        _draw(run_dir)


def _attempt(
    config: RunConfig,
    run_dir: Path,
    given: FromPython,
    restarts: Restarts,
    resumed: Resumed | None,
    prepared: tuple[RunInput, PromptSet] | None,
    callbacks: Callbacks,
) -> dict[str, Any]:
    """One run of the pipeline, to its end or to its first error. `restarts` goes on counting over attempts."""
    with_paths = with_stage_paths(config, run_dir)
    checkpoint = None if resumed is None else resumed.checkpoint
    if prepared is None and resumed is None:
        prepared = _work(with_paths, run_dir, given, is_resumed=False)
    work, prompts = prepared or _build(with_paths, given, is_resumed=checkpoint is not None)  # rewards were called
    report = prompts.report
    config, with_paths = _for_gpus(config, with_paths.with_longest_prompt(report.longest), given)
    cut = None if resumed is None else resumed.cut
    if cut is not None and resumed is not None:
        first = min([*cut.schedule.readmit, cut.schedule.next_ordinal])
        work = replace(work, partials=_admissible(config, resumed), num_events=cut.num_events, first_ordinal=first)
    tally = _tally(config, run_dir, given, restarts.counts, report, cut)
    screen = Screen(config, run_dir) if given.display else None
    save_config(config, run_dir / "config.toml")  # from here on the directory is that of a run
    _tell_of_prompts(report, screen)
    note = _unheard if screen is None else screen.note
    with (
        contextlib.nullcontext() if screen is None else contextlib.closing(screen),
        HeldFolder(run_dir) as folder,
        open_trackers(config, run_dir, first_step=cut.schedule.steps_done if cut else 0, note=note) as trackers,
    ):
        controller = Controller(
            with_paths,
            _pipeline(with_paths, given, checkpoint),
            schedule_for(with_paths, None if cut is None else cut.schedule),
            work,
            Observers(with_paths, run_dir, tally, screen=screen, callbacks=callbacks, trackers=trackers),
            run_dir=run_dir,
            cluster=given.cluster,
            interrupts=given.interrupts,
            callbacks=callbacks,
        )
        if isinstance(prompts.train, StreamedPrompts):
            prompts.train.while_waiting = controller.executors.keep_in_touch

        def conclude(error: BaseException | None = None) -> Summary:
            folder.check()
            is_lost = isinstance(error, ExecutorLost) and restarts.left(error.executor) > 0
            return _conclude(tally, run_dir, screen, trackers, is_followed=is_lost and callbacks.error is None)

        tally.status = "failed"  # until the controller says otherwise
        try:
            with given.interrupts.deferred(config.shutdown_grace_s, lambda: _acknowledge(given, tally)):
                told = _run_and_conclude(controller, conclude)
            if told["status"] == "interrupted":
                note(given.how_to_go_on(run_dir))
            return told
        except Interrupted as interrupted:  # once more, or the grace period is over: there is no time for a report
            _end_at_once(interrupted, tally, folder, given.how_to_go_on(run_dir), note)
            raise


def _acknowledge(given: FromPython, tally: Tally) -> None:
    """Tell of a first signal that comes when the controller, which tells of others, is done. Called in its handler."""
    if tally.status in ENDED and given.display and given.interrupts.is_news():
        line = given.interrupts.heard("the run is saved, and its report is being made")
        os.write(2, f"{line}\n".encode())  # the screen may be amid a line of its own


def _unheard(_: str) -> None:
    """Take a line that nobody is there to read."""


def _tell_of_prompts(report: PromptReport, screen: Screen | None) -> None:
    """Show the report on prompts; without a screen its warning goes to the program's log."""
    if screen is not None:
        screen.started(report)
        return
    if report.left_out:
        log.info("left out: %s", report.left_out)
    if report.warning is not None:
        log.warning("%s", report.warning)


def _end_at_once(
    interrupted: Interrupted, tally: Tally, folder: HeldFolder, how_to_go_on: str, note: Callable[[str], None]
) -> None:
    """Say what a run that is ended at once has saved, and write its summary: if it has a folder, and the disk room.

    Whoever ends it may wait for a few seconds only, so the summary is without what takes longer to read.
    """
    saved = "all is saved; page, trackers, callbacks may lack the end"
    is_saved = tally.status in ENDED
    note(f"{interrupted}: ended at once, {saved if is_saved else 'without a checkpoint of the present step'}")
    if not is_saved:
        tally.status = "interrupted"
    with contextlib.suppress(DiskError):
        folder.check()
        write_summary(tally.summary(folder.path, most_bytes=QUICK_BYTES), folder.path / "summary.json")
    if tally.status != "done":
        note(how_to_go_on)


def _pipeline(config: RunConfig, given: FromPython, checkpoint: Path | None) -> Pipeline:
    if given.pipeline is not None:
        return given.pipeline(config)
    return default_pipeline(
        config,
        functions=given.functions,
        environments=given.environments,
        resume=checkpoint,
        remote=given.remote,
    )


def _tally(
    config: RunConfig, run_dir: Path, given: FromPython, restarts: Counter[str], report: PromptReport, cut: Cut | None
) -> Tally:
    """Return the tally of an attempt, with what the run counted before the cut."""
    tally = Tally(config, started_s=WallClock().now_s(), restarts=restarts, resume_call=given.other_call(run_dir))
    tally.data = Data(
        report.num_train, report.num_eval, report.num_too_long, report.max_tokens, report.longest, report.sets
    )
    if cut is not None:
        tally.restore(cut.run)
        for line in read_jsonl(run_dir / "metrics.jsonl", dict[str, Any]):
            tally.recall(line)
        if cut.schedule.steps_done < config.steps:
            drop_after(run_dir / "samples.json")
    return tally


def _run_and_conclude(controller: Controller, conclude: Callable[[BaseException | None], Summary]) -> dict[str, Any]:
    try:
        controller.run()
    except Interrupted:
        raise
    except BaseException as error:
        controller.tally.error = reason(error)
        with contextlib.suppress(DiskError):  # a full disk has already been told of, by whoever met it first
            conclude(error)
        raise
    told: dict[str, Any] = msgspec.to_builtins(conclude(None), str_keys=True)
    return told


def _mark_interrupted(run_dir: Path) -> None:
    """The attempt before the pause has left a summary, which says that it failed."""
    path = run_dir / "summary.json"
    if path.is_file():
        write_summary(msgspec.structs.replace(read_summary(path), status="interrupted"), path)


def _admissible(config: RunConfig, resumed: Resumed) -> dict[int, tuple[Unfinished, ...]]:
    """Return the partial completions and episodes whose bound holds in any step that could train them.

    It is judged by the drops of the cut, and holds for all that was admitted before the cut. What lost its replica
    between the cut and its saving may have started again thanks to a drop that the resumed run need not repeat.
    """
    bound, cut = config.staleness_bound, resumed.cut
    if bound is None or cut is None or not config.bounds_admissions:
        return resumed.partials
    oldest = {
        ordinal: oldest_version(
            place_of(ordinal, cut.schedule.dropped),
            groups_per_step=config.groups_per_step,
            reorder_window=config.window,
            max_staleness=bound,
        )
        for ordinal in resumed.partials
    }
    return {
        ordinal: tuple(one for one in partials if min(one.versions) >= oldest[ordinal])
        for ordinal, partials in resumed.partials.items()
    }


def _conclude(tally: Tally, run_dir: Path, screen: Screen | None, trackers: Trackers, *, is_followed: bool) -> Summary:
    """Write summary, samples, timeline and report of what there was. The summary says that a run is done.

    An attempt that `is_followed` by another one holds it up as little as can be: no long record is read.
    """
    summary = tally.summary(run_dir, most_bytes=QUICK_BYTES if is_followed else None)
    samples = tally.write_samples(run_dir)
    write_summary(summary, run_dir / "summary.json")
    if not is_followed:
        merge_timelines(run_dir)
        _draw(run_dir)
    trackers.end(summary.status, flatten(msgspec.to_builtins(summary, str_keys=True)))
    if screen is not None:
        screen.finished(samples, summary)
    return summary


def _draw(run_dir: Path) -> None:
    """The report shows what is saved already: whatever is wrong with it ends no run, and hides nothing that did."""
    from slipstream.observe.report import write_report  # the run's start does not wait for it

    try:
        write_report(run_dir, describe())
    except DiskError:
        raise
    except SlipstreamError as error:
        log.warning("there is no report.html: `slipstream report %s` tries again: %s", run_dir, error)
    except Exception:
        log.exception("there is no report.html: `slipstream report %s` tries again", run_dir)


def resume_rl(config: RunConfig, run_dir: Path, given: FromPython) -> dict[str, Any]:
    """Continue from the newest whole checkpoint, or begin anew where the attempts so far have left none.

    With more steps than the run was to have, a run that is done goes on, too. What was written so far is kept under
    `attempt_<n>/` (`stages/resume.py`). ConfigError where RL is done, or has gone on further than `config` says.
    """
    check_goes_on(config, run_dir)
    with_paths = with_stage_paths(config, run_dir)
    found = _checked_checkpoint(with_paths, run_dir)
    checkpoint = found[0]
    before = resolve(run_dir / "config.toml")
    if checkpoint is None and is_rl_done(before, run_dir):
        raise ConfigError(
            f"'{run_dir}' has no checkpoint to go on from",
            got="a run that is done, without its checkpoints",
            allowed="the folder of a run as it was left",
            hint=f"a new run from its policy takes {policy_flags(run_dir, config)}",
        )
    notes = [] if checkpoint is None else extension(before, config, read_cut(checkpoint).schedule)
    is_resumed = checkpoint is not None
    prepared = _work(with_paths, run_dir, given, is_resumed=is_resumed)  # errors come before files are moved
    _for_gpus(config, with_paths.with_longest_prompt(prepared[1].report.longest), replace(given, display=False))
    resumed = prepare_resume(run_dir, found)
    if (run_dir / EVALUATION_FILE).exists():  # of a policy that is trained further
        (run_dir / EVALUATION_FILE).replace(resumed.attempt / EVALUATION_FILE)
    tell(config, given, [*resumed.notes, *notes])
    return run_rl(config, run_dir, given, resumed=resumed, prepared=prepared)


def extension(before: RunConfig, config: RunConfig, cut: Snapshot) -> list[str]:
    """Sentences on what another number of steps changes besides the run's length. ConfigError for too few.

    Groups that the run has admitted are trained, unless its policy admits more than that: it is at least as long as it
    takes them.
    """
    if config.steps == before.steps:
        return []
    least = cut.steps_done
    if config.bounds_admissions:
        least = max(least, math.ceil((cut.next_ordinal - len(cut.dropped)) / config.groups_per_step))
    if config.steps < least:
        got = f"steps = {config.steps}, after {cut.steps_done} steps"
        allowed = f"at least {least}: what is trained, or sampled for the next steps"
        what = "the run has gone further than that"
        if config.steps == cut.steps_done:
            what = "the run has done that many steps, and has begun the next ones"
        raise ConfigError(what, got=got, allowed=allowed)
    notes = [f"steps: {config.steps}, which were {before.steps}"]
    at = cut.steps_done * config.updates_per_step
    optimizers = {"trainer": config.trainer.optimizer} | (
        {"critic": config.critic.optimizer} if config.has_critic else {}
    )
    for section, optimizer in optimizers.items():
        if optimizer.schedule == "constant":
            continue
        old, new = (
            optimizer.lr * lr_factor(optimizer, update=at, total_updates=one.steps * one.updates_per_step)
            for one in (before, config)
        )
        notes.append(
            f"{section}.optimizer.schedule = '{optimizer.schedule}' is over all steps: after step {cut.steps_done} the "
            f"learning rate is {new:.3g} now, where it was to be {old:.3g}, and falls to 0 at step {config.steps}"
        )
    return notes


def _work(config: RunConfig, run_dir: Path, given: FromPython, *, is_resumed: bool) -> tuple[RunInput, PromptSet]:
    """Prompts and demonstrations. ConfigError for data that cannot be read, or that the rewards cannot score."""
    with told_of("reading prompts", display=given.display):
        work, prompts = _build(config, given, is_resumed=is_resumed, private=[str(run_dir)])
    check_answers(config.rewards, prompts.all)
    with told_of("calling rewards on two prompts", display=given.display):
        note = dry_call(
            config.rewards,
            task_table(config.prompts.tasks),
            prompts.all,
            functions=given.functions,
            group_size=config.samples_per_group,
            private=[str(run_dir)],
        )
    if note is not None:
        tell(config, given, [note])
    return work, prompts


def _build(
    config: RunConfig, given: FromPython, *, is_resumed: bool, private: Sequence[str] | None = None
) -> tuple[RunInput, PromptSet]:
    """Prompts and demonstrations, and whether memory has room for the longest of them.

    With `private` folders environments are tried, too: they are hidden from them.
    """
    local = with_folders(config)
    with Rehearsal(local, given.environments, private=private or ()) as rehearsal:
        work, prompts = build_work(local, is_resumed=is_resumed, tools=rehearsal.tools, functions=given.functions)
        if private is not None:
            rehearsal.play(prompts.all, tokenizer := build_tokenizer(local.model))
            if prompts.eval[0].messages is not None and (note := missing_end(local, tokenizer)):
                tell(config, given, [note])
        if private is not None and rehearsal.tools and prompts.eval[0].messages is None:
            tell(config, given, ["tools: prompts without a chat template do not show them; demonstrations alone may"])
    if config.prompts.max_prompt_tokens is None:
        check_room(local.with_longest_prompt(prompts.report.longest), remote=given.remote)
    return work, prompts


def _for_gpus(config: RunConfig, with_paths: RunConfig, given: FromPython) -> tuple[RunConfig, RunConfig]:
    """`config` with sizes for this machine's GPUs, which a resumed run keeps; `with_paths` with shares of them, too."""
    if not config.computes_on_gpu:
        is_here = config.generator.engine == "native" and not given.remote
        if is_here and (gpus := describe().gpus):
            unused = f"this machine has {plural(len(gpus), 'GPU')}, and trainer and generator compute on its CPU"
            tell(config, given, [f"{unused}: their `device` is 'cpu'"])
        return config, with_paths
    from slipstream.plan.gpu_sizes import with_sizes
    from slipstream.plan.one_gpu import with_shares

    with_paths, sizes = with_sizes(with_paths, remote=given.remote)
    config = config.model_copy(update={"generator": with_paths.generator})
    with_paths, shares = with_shares(with_paths, remote=given.remote)
    if chosen := [line for line in (sizes, shares) if line is not None]:
        tell(config, given, chosen)
    return config, with_paths


def _checked_checkpoint(config: RunConfig, run_dir: Path) -> Found:
    """Return the newest whole checkpoint, or None without any, and what is wrong with newer ones.

    ConfigError where all are damaged; for one of another model; for one without the run's ledger; and for lines of a
    run that are no regular file.
    """
    for name in FILES:
        _check_lines(run_dir / name)
    try:
        checkpoint, damages = _newest_checkpoint(run_dir)
        if checkpoint is not None:
            _check_content(checkpoint, config, run_dir)
    except CheckpointError as error:
        raise ConfigError(error.what, got=error.got, allowed=error.allowed, hint=error.hint) from error
    return checkpoint, damages


def _newest_checkpoint(run_dir: Path) -> Found:
    """Return what `newest_whole` finds. CheckpointError where all are damaged: the user decides to begin anew."""
    checkpoint, damages = newest_whole(run_dir / "checkpoints")
    if checkpoint is None and damages:
        hint = f"no other checkpoint is whole: without {run_dir / 'checkpoints'} the run begins anew"
        raise CheckpointError(damages[0].what, got=damages[0].got, allowed=damages[0].allowed, hint=hint)
    return checkpoint, damages


def _check_content(checkpoint: Path, config: RunConfig, run_dir: Path) -> None:
    """Raise ConfigError or CheckpointError unless the whole `checkpoint` fits the run's model and its ledger."""
    if (found := read_manifest(checkpoint).format) not in FORMATS:
        what = f"checkpoint {checkpoint} has an unknown format"
        hint = "was it written by a newer Slipstream?"
        raise ConfigError(what, got=found, allowed=", ".join(map(str, FORMATS)), hint=hint)
    local = with_folders(config)
    if differing := list(policy_shapes(checkpoint, check_policy(local), local.model.lora).items())[:3]:
        raise ConfigError(
            f"checkpoint {checkpoint} belongs to another model",
            got=", ".join(f"{name} {found}" for name, (found, _) in differing),
            allowed=", ".join(f"{name} {expected}" for name, (_, expected) in differing),
            hint=f"was {run_dir / 'config.toml'} changed? a resumed run keeps its configuration",
        )
    if not (run_dir / "ledger.jsonl").is_file():
        what = f"'{run_dir}' is no whole run: it has a checkpoint, and no ledger"
        hint = "a run's folder is moved or copied as a whole"
        raise ConfigError(what, got="no ledger.jsonl", allowed="ledger.jsonl beside checkpoints", hint=hint)
    check_fits(run_dir / "ledger.jsonl", read_cut(checkpoint).schedule)


def _check_lines(path: Path) -> None:
    """Raise ConfigError for what a resume could not copy: a device, a pipe, a link to one."""
    try:
        if os.path.lexists(path):
            open_regular(path).close()
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read", got=error.strerror, allowed="a file of lines") from error


def tell(config: RunConfig, given: FromPython, notes: Sequence[str]) -> None:
    with watch(config, "rl", display=given.display) as watcher:
        for note in notes:
            watcher.note(note)
