import json
from pathlib import Path

import msgspec
import pytest
from synthetic_run import make_summary

from slipstream.core.errors import SlipstreamError
from slipstream.core.held_out import Measured
from slipstream.observe.hardware import describe
from slipstream.observe.summary import (
    Evaluation,
    Evaluations,
    read_summary,
    versions,
    violations,
    write_summary,
)

# The interface. A change here is a breaking change for everybody's scripts.
FIELDS = {
    "": "recipe seed status steps wall_s policy_version model_params eval throughput staleness accounting prompts "
    "weight_sync padding_frac versions earlier_s adapter_params evaluation alarms data restarts model_share "
    "model_cpu_share balance error stopped_because best callback_s episodes stages judges rows "
    "resume_call",
    "eval": "before after primary sets",
    "eval.before": "accuracy sampled_accuracy num_prompts reward sampled_reward reward_parts "
    "sampled_reward_parts reward_error sampled_reward_error num_judged sampled_num_judged",
    "eval.after": "accuracy sampled_accuracy num_prompts reward sampled_reward reward_parts "
    "sampled_reward_parts reward_error sampled_reward_error num_judged sampled_num_judged",
    "throughput": "generated_tokens_per_s trained_tokens_per_s completions_per_s",
    "staleness": "max mean bound histogram updates_max",
    "prompts": "admitted trained failed skipped pending lost repeated regenerated_tokens failed_completions",
    "weight_sync": "count skipped bytes transfer_s_p50 pause_s_p50 pause_s_max",
    "data": "num_train num_eval num_too_long max_tokens longest_tokens sets",
    "episodes": "episodes turns mean_turns restarts failed cut tool_calls tool_errors environment_s parked_hit_frac "
    "evicted_sessions forks refused restored begun_again",
    "judges.judge": "scored cached failures requests retries input_tokens output_tokens seconds cost",
    "rows": "unshared read saved_frac",
    "versions": "python torch slipstream commit",
    "balance": "idle interference wasted_tokens starves bottleneck verdict split dial",
    "balance.interference": "decode train",
    "balance.split": "unit now balanced whole step_s_now step_s_balanced step_s_whole",
    "balance.dial": "field now suggested effect",
}


@pytest.mark.parametrize("section", FIELDS)
def test_the_fields_are_stable(tmp_path: Path, section: str):
    write_summary(make_summary(), tmp_path / "summary.json")
    found = json.loads((tmp_path / "summary.json").read_text())
    for key in filter(None, section.split(".")):
        found = found[key]
    assert list(found) == FIELDS[section].split()


def test_a_summary_comes_back_equal(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_summary(make_summary(status="running"), path)
    write_summary(make_summary(), path)
    assert read_summary(path) == make_summary()
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    path.write_text('{"recipe": "x"}')
    with pytest.raises(SlipstreamError, match="missing required field"):
        read_summary(path)


def test_a_summary_from_before_there_were_held_out_rewards_is_read(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_summary(make_summary(), path)
    told = json.loads(path.read_text())
    for moment in ("before", "after"):
        told["eval"][moment] = {"accuracy": 0.5, "sampled_accuracy": 0.25, "num_prompts": 20}
    path.write_text(json.dumps(told))
    found = read_summary(path).eval.after
    assert found is not None
    assert (found.greedy, found.sampled) == (Measured(accuracy=0.5), Measured(accuracy=0.25))


def test_a_sound_summary_passes():
    assert violations(make_summary()) == []


@pytest.mark.parametrize(
    ("section", "change", "complaint"),
    [
        ("prompts", {"trained": 39}, "admitted 42, but trained"),
        ("prompts", {"lost": 1}, "1 lost"),
        ("staleness", {"max": 3}, "above its bound"),
        ("staleness", {"max": 1}, "histogram ends at 2"),
        ("accounting", {"trainer": {"forward_backward": 12.0}}, "trainer sums to 12.0"),
        ("accounting", {"trainer": {"forward_backward": 13.5, "unlabelled": -1.0}}, "a state of -1.0"),
    ],
)
def test_each_broken_identity_is_named(section: str, change: dict, complaint: str):
    summary = make_summary()
    old = msgspec.to_builtins(summary)[section]
    broken = msgspec.convert(msgspec.to_builtins(summary) | {section: old | change}, type(summary), strict=False)
    assert any(complaint in found for found in violations(broken))


def test_versions_and_hardware_describe_this_machine():
    assert versions().torch
    hardware = describe()
    assert 1 <= hardware.num_cores <= hardware.num_cores_machine
    assert hardware.memory_bytes > 2**27
    assert set(hardware.lines()) >= {"CPU", "cores", "memory", "shared memory", "GPUs"}


def test_accuracy_that_reads_0_throughout_is_explained() -> None:
    def evaluation(greedy: float | None, sampled: float | None = 0.0) -> Evaluation:
        return Evaluation(greedy, sampled, 5, reward=0.5)

    wrong = evaluation(0.0)
    assert "no held-out answer reached 1 by eval.measure" in str(Evaluations(before=wrong, after=wrong).never_right)
    for right in (
        Evaluations(before=wrong, after=evaluation(0.2)),
        Evaluations(before=evaluation(0.2), after=wrong),
        Evaluations(before=wrong, after=evaluation(0.0, sampled=0.2)),
        Evaluations(before=wrong),  # the run is not over
        Evaluations(before=evaluation(None, None), after=evaluation(None, None)),
        Evaluations(),
    ):
        assert right.never_right is None
