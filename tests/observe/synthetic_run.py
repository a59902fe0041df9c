"""A made-up run directory, complete and small, and the pieces it is built from."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.core.clock import VirtualClock
from slipstream.core.held_out import GREEDY_PREFIX, SAMPLED_PREFIX, Measured
from slipstream.core.run_log import read_metrics
from slipstream.core.types import Completion, Group, Prompt, Rollout, Segment, VersionSpan
from slipstream.observe.balance import Balance, Dial, Interference, Split
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.recorder import RolloutRecorder, rollout_line
from slipstream.observe.samples import Sample, write_samples
from slipstream.observe.summary import (
    Data,
    EpisodeCounts,
    Evaluation,
    Evaluations,
    JudgeCounts,
    Prompts,
    Staleness,
    Summary,
    Throughput,
    TrainedRows,
    Versions,
    WeightSync,
    read_summary,
    write_summary,
)
from slipstream.observe.timeline import Timeline, account_file, timeline_path

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>&\x00\u2028"


def record_group(recorder: RolloutRecorder, group: Group, *, step: int | None) -> None:
    recorder.record([rollout_line(rollout) for rollout in group.rollouts], step=step)


def make_group(ordinal: int, *, text: str = "cba", size: int = 2, failure: str | None = None) -> Group:
    prompt = Prompt(prompt_id=f"p{ordinal}", text="abc>", tokens=np.arange(4, dtype=np.int32), task="t", answer="cba")
    rollouts = []
    for sample in range(size):
        segments = (
            Segment(
                tokens=np.arange(3, dtype=np.int32),
                behaviour_logprobs=np.array([-1.0, -2.0, -3.0], dtype=np.float32),
                version_spans=(VersionSpan(start=0, version=ordinal), VersionSpan(start=2, version=ordinal + 1)),
            ),
            Segment(tokens=np.arange(2, dtype=np.int32)),
            Segment(
                tokens=np.arange(1, dtype=np.int32),
                behaviour_logprobs=np.array([-6.0], dtype=np.float32),
                version_spans=(VersionSpan(start=0, version=ordinal + 1),),
            ),
        )
        completion = Completion(
            ordinal=ordinal, sample=sample, prompt=prompt, segments=segments, text=text, finish_reason="stop"
        )
        rollouts.append(
            Rollout(completion=completion, reward=float(sample), reward_parts={"task": 1.0}, failure=failure)
        )
    return Group(ordinal=ordinal, rollouts=tuple(rollouts))


def make_summary(**changes: object) -> Summary:
    summary = Summary(
        recipe="quickstart",
        seed=0,
        status="done",
        steps=20,
        wall_s=12.5,
        policy_version=20,
        model_params=650_000,
        eval=Evaluations(before=Evaluation(0.412, 0.3, 500), after=Evaluation(0.934, 0.81, 500)),
        throughput=Throughput(generated_tokens_per_s=5210.0, trained_tokens_per_s=4890.0, completions_per_s=700.0),
        staleness=Staleness(max=2, mean=0.8, bound=2, histogram={0: 900, 1: 1500, 2: 300}, updates_max=5),
        accounting={
            "generator-0": {"decode": 9.0, "swap": 0.5, "wait_trainer": 2.0, "unlabelled": 1.0},
            "trainer": {"forward_backward": 8.0, "wait_generation": 4.0, "unlabelled": 0.5},
        },
        prompts=Prompts(
            admitted=42, trained=40, failed=0, skipped=1, pending=1, lost=0, repeated=0, regenerated_tokens=0
        ),
        weight_sync=WeightSync(
            count=20, skipped=1, bytes=52_000_000, transfer_s_p50=0.004, pause_s_p50=0.0004, pause_s_max=0.002
        ),
        padding_frac=0.0,
        rows=TrainedRows(unshared=90_000, read=54_000, saved_frac=0.4),
        episodes=EpisodeCounts(
            episodes=350,
            turns=910,
            mean_turns=2.6,
            restarts=3,
            failed=1,
            cut=12,
            tool_calls=640,
            tool_errors=25,
            environment_s=31.5,
            parked_hit_frac=0.96,
            evicted_sessions=4,
        ),
        judges={
            "judge": JudgeCounts(
                scored=640,
                cached=12,
                failures=3,
                requests=641,
                retries=10,
                input_tokens=90_000,
                output_tokens=41_000,
                seconds=1282.0,
                cost=0.25,
            )
        },
        data=Data(num_train=4000, num_eval=500, num_too_long=3, max_tokens=64, longest_tokens=61),
        versions=Versions(python="3.11.7", torch="2.13.0", slipstream="0.1.0", commit=None),
        balance=Balance(
            idle={"generator-0": 0.17, "trainer": 0.32},
            interference=Interference(decode=1.2, train=1.1),
            wasted_tokens={"no_signal": 96, "failed": 0, "left": 12},
            starves="trainer",
            bottleneck="generation",
            verdict="Generation is the bottleneck: the trainer idles 32% of the time, generators 17%.",
            split=Split(
                unit="threads",
                now={"trainer": 2, "generator": 2},
                balanced={"trainer": 1.8, "generator": 2.2},
                whole={"trainer": 2, "generator": 2},
                step_s_now=0.62,
                step_s_balanced=0.5,
                step_s_whole=0.55,
            ),
            dial=Dial(field="trainer.epochs", now=1, suggested=2, effect="trainer.epochs = 2 would use it"),
        ),
    )
    return msgspec.structs.replace(summary, **changes)


RATIO_EDGES = ("0", "0.5", "0.98", "1.02", "2")


def step_metrics(step: int) -> dict[str, float]:
    """A line of `metrics.jsonl` as a run writes it, every number a function of the step; 135 tokens are trained on."""
    shift = 5 * (-1) ** step
    shares = (0.0, 0.1, 0.6 + step % 20 / 200, 0.2, 0.1 - step % 20 / 200)
    return {
        "reward": 0.4 + step / 50,
        "loss": float("nan"),
        "entropy": 2.0 / (1 + step),
        "grad_norm": 1.0 + step % 3,
        "step_s": 0.62,
        "tokens_trained": 135.0,
        "completion_tokens_mean": 6.0,
        "truncated_frac": 0.05,
        "no_signal_frac": step % 20 / 40,
        "staleness_mean": 0.8,
        "staleness_max": 2.0,
        "staleness_tokens/lag_0": 45.0 + shift,
        "staleness_tokens/lag_1": 75.0 - shift,
        "staleness_tokens/lag_2": 15.0,
        "kl_k2": 0.002,
        "kl_k3": 0.002,
        "ess": 0.98,
        "clipped_frac": 0.01,
        "logprob_diff_mean/lag_0": 1e-6,
        "logprob_diff_mean/lag_1": 0.02,
        "generated_tokens_per_s": 5000.0 + step,
        "trained_tokens_per_s": 4000.0,
        **{f"ratio_share/{edge}": share for edge, share in zip(RATIO_EDGES, shares, strict=True)},
    }


def make_run_dir(run_dir: Path, *, steps: int = 20) -> Path:
    """A finished run of 20 steps on a virtual clock that starts at 50 s, with hostile text in it.

    A step: the trainer waits 0.2 s and computes 0.4 s while the generator decodes; then 0.02 s for a swap, in which the
    trainer says nothing of itself.
    """
    config = f'recipe = "quickstart"\nsteps = {steps}\n[generator]\nnum_slots = 64\nmax_new_tokens = 12\n'
    (run_dir / "config.toml").write_text(config)
    metrics = MetricsWriter(run_dir / "metrics.jsonl")
    rollouts = RolloutRecorder(run_dir / "rollouts.jsonl")
    clock = VirtualClock(50.0)
    trainer = Timeline("trainer", timeline_path(run_dir, "trainer"), clock)
    generator = Timeline("generator-0", timeline_path(run_dir, "generator-0"), clock)
    trainer.set_idle_state("wait_generation")
    for step in range(steps):
        if step % 10 == 0:
            metrics.write(step=step, version=step, wall_s=step * 0.62, metrics={"eval_accuracy": 0.4 + step / 40})
        with generator.span("decode"), trainer.idle():
            clock.advance(0.2)
        with generator.span("decode"), trainer.span("forward_backward", step=step):
            clock.advance(0.4)
        trainer.instant("trained", step=step)
        with generator.span("swap", version=step + 1):
            clock.advance(0.02)
        generator.instant("swapped", version=step + 1)
        record_group(rollouts, make_group(step, text=HOSTILE if step == 19 else "cba"), step=step)
        metrics.write(step=step, version=step + 1, wall_s=(step + 1) * 0.62, metrics=step_metrics(step))
    for recorder in (trainer, generator, rollouts, metrics):
        recorder.close()
    end_s = 50.1 + 0.62 * steps
    accounting = {t.process: account_file(timeline_path(run_dir, t.process), 50.0, end_s) for t in (generator, trainer)}
    summary = make_summary(accounting=accounting, wall_s=end_s - 50.0, steps=steps)
    write_summary(summary, run_dir / "summary.json")
    write_samples(
        [Sample("abc>", "cba", "abc", HOSTILE, before_reward=0.0, before_is_right=False)], run_dir / "samples.json"
    )
    return run_dir


def measure_rewards(run_dir: Path, *, has_accuracy: bool) -> None:
    """Make of `make_run_dir`'s one that has held-out rewards of two terms, with a measure or without."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    metrics = MetricsWriter(run_dir / "metrics.jsonl.new")
    for line in lines:
        step = line["step"]
        reward = -0.75 + step / 32
        found = Measured(reward, {"format": reward / 2, "brevity": reward / 2}, 0.25 if has_accuracy else None)
        told = found.metrics(GREEDY_PREFIX) | found.metrics(SAMPLED_PREFIX) if "eval_accuracy" in line else line
        if "reward" in line:
            told = line | {"reward_parts/format": -0.25, "reward_parts/brevity": -0.5}
        metrics.write(step=step, version=line["version"], wall_s=line["wall_s"], metrics=told)
    metrics.close()
    (run_dir / "metrics.jsonl.new").replace(run_dir / "metrics.jsonl")
    summary, accuracies = read_summary(run_dir / "summary.json"), (0.25, 0.5) if has_accuracy else (None, None)
    before, after = (
        Evaluation.of(*2 * (Measured(reward, {"format": reward, "brevity": reward / 2}, accuracy),), num_prompts=500)
        for reward, accuracy in zip((-0.75, -0.125), accuracies, strict=True)
    )
    told = msgspec.structs.replace(summary, eval=Evaluations(before=before, after=after))
    write_summary(told, run_dir / "summary.json")
    marks = {"before_is_right": False, "after_is_right": True} if has_accuracy else {}
    sample = Sample("abc>", "cba", "abc", "cba", before_reward=-0.75, after_reward=-0.125, **marks)
    write_samples([sample], run_dir / "samples.json")


def add_evaluation(run_dir: Path, before: tuple[float, float], after: tuple[float, float]) -> None:
    """What the stage `evaluate` leaves: (KL, win rate) at both moments, with standard errors of a tenth of them."""

    def moment(kl: float, rate: float) -> dict[str, Any]:
        spread = {"mean": 1.0, "standard_error": 0.1}
        return {
            "gold": {
                "win_rate": {"mean": rate, "standard_error": rate / 10},
                "difference": spread,
                "mean_score": 0.5,
                "pass_at_k": {},
            },
            "reward_models": None,
            "judge": None,
            "drift": {
                "perplexity": {"per_response_token": spread, "per_text_token": spread},
                "kl": {"per_sequence": {"mean": kl, "standard_error": kl / 10}},
            },
            "lengths": {"mean": 5.0, "truncated_share": 0.0},
        }

    found = {"num_prompts": 100, "temperature": 1.0, "before": moment(*before), "after": moment(*after)}
    (run_dir / "evaluation.json").write_bytes(msgspec.json.encode(found))
