"""The GPU edition without a GPU: what would be run is sound, what is read from it is what was written, and it is left
out where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import __main__ as command
from experiments.async_vs_sync import task
from experiments.async_vs_sync.reading import Curve, Times
from experiments.gpu import experiment, runs
from experiments.gpu.experiment import Found, Numbers, numbers_of, told, verdicts
from experiments.lab import Lab, Unavailable, metrics, summary
from slipstream.generator.device import replica_device
from slipstream.models.config import new_config


def specs() -> dict[runs.Key, Any]:
    return {key: runs.run(key, dataset=Path("d.jsonl"), start=Path("start")) for key in runs.all_keys()}


def test_every_run_keeps_its_weights_on_one_gpu_and_fills_its_slots():
    for spec in [*specs().values(), *(runs.start(size, Path("d.jsonl")) for size in runs.SIZES)]:
        config = spec.config()
        assert config.weights_stay_on_gpu
        assert (config.trainer.device, config.trainer.ranks) == ("cuda", 1)
        assert [str(replica_device(config, 0, num_gpus)) for num_gpus in (1, 8)] == ["cuda:0"] * 2  # the trainer's
        assert config.generator.replicas == 1
        assert config.completions_per_step == config.generator.num_slots == 256
    judged = [spec.config() for (name, _), spec in specs().items() if "judge" in name]
    assert [config.rewards.num_workers for config in judged] == [256] * 6


def test_cases_differ_where_they_are_named_for_it():
    configs = {name: spec.config() for (name, seed), spec in specs().items() if seed == 0}
    assert len(configs) == len(runs.CASES) == 6 + 2 + 2 + 1 + 5
    assert configs["sync, co-located, large"].max_staleness == 0
    kept, recomputed = configs[runs.KEPT], configs[runs.RECOMPUTED]
    assert (kept.generator.kv_on_update, recomputed.generator.kv_on_update) == ("keep", "recompute")
    assert kept.model_dump() == recomputed.model_copy(update={"generator": kept.generator}).model_dump()
    policies = {configs[name].schedule.policy for name in runs.PEERS}
    assert policies == {"drop_stale", "areal", "sample_budget", "one_step", "finish_order"}
    assert kept.schedule.policy == "oldest_first"


def test_policies_have_the_sizes_that_the_readme_announces():
    readme = (Path(experiment.__file__).parent / "README.md").read_text()
    for name, size in runs.SIZES.items():
        config = runs.start(name, Path("d.jsonl")).config()
        shape = new_config(config.model, vocab_size=16)
        width, layers = shape.hidden_size, shape.num_layers
        params = layers * (4 * width**2 + 3 * width * shape.intermediate_size)
        assert f"| {size.words} | {width} | {layers} |" in readme
        assert float(size.words.split()[0]) == pytest.approx(params / 1e6, rel=0.03)


def test_without_a_gpu_it_is_left_out_and_fails_only_who_asked_for_it(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Unavailable, match="no CUDA GPU"):
        runs.make(Lab(tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"], "nothing was run"
    assert command.main(["gpu", "--folder", str(tmp_path)]) == 1
    assert "gpu left out: torch sees no CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr(command, "EXPERIMENTS", {"gpu": command.EXPERIMENTS["gpu"]})
    assert command.main(["--all", "--folder", str(tmp_path)]) == 0


def test_numbers_are_those_of_the_files():
    about = {
        "throughput": {"completions_per_s": 50.0, "generated_tokens_per_s": 5000.0},
        "staleness": {"mean": 1.5, "max": 4, "histogram": {"0": 300, "1": 600}},
        "balance": {"wasted_tokens": {"stale": 80, "left": 20}},
    }
    lines = [
        {"accuracy": 0.5},
        {"reward": 0.5, "completion_tokens_mean": 90.0, "logprob_diff_mean": 0.01, "reward_parts/exact_match": 0.25},
        {"reward": 0.7, "completion_tokens_mean": 110.0, "logprob_diff_mean": 0.03, "reward_parts/exact_match": 0.375},
    ]
    curve = Curve(steps=[5, 10, 15], seconds=[3.0, 6.0, 9.0], reward=[0.5, 0.9, 0.95], gold=[0.0, 0.1, 0.2])
    assert numbers_of(about, lines, curve) == Numbers(
        completions_per_s=50.0,
        generated_tokens_per_s=5000.0,
        wasted_share=pytest.approx(0.1),
        staleness_mean=1.5,
        staleness_max=4,
        trained_tokens_mean=100.0,
        logprob_error=pytest.approx(0.02),
        first_gold=0.25,
        seconds_to_reward=6.0,
    )


STEP_S = {"small": (1.0, 0.9), "medium": (2.0, 1.6), "large": (6.0, 3.0)}


def made_up(**steps: tuple[float, float, float]) -> Found:
    """In turns 1, 2 and 6 s; overlapped 1.1, 1.25 and 2 times as fast. Gold scores 0.80, 0.81, 0.82."""
    times, curves, numbers = {}, {}, {}
    for name, seed in runs.all_keys():
        case = runs.CASES[name]
        step_s = STEP_S[case.size][case.mode != runs.SYNC] + ("judge" in name) * (
            1.0 if case.mode == runs.SYNC else 0.1
        )
        step_s = steps.get(name, (step_s,) * 3)[seed] * (1 + 0.01 * seed)
        times[name, seed] = Times(step_s, step_s, 1.0, 1.0, 0.2, 0.1, {}, None, None)
        gold = 0.80 + 0.01 * seed
        curves[name, seed] = Curve([5, 10], [step_s, 2 * step_s], [0.4, 0.95], [0.3, gold])
        numbers[name, seed] = Numbers(50.0, 5000.0, 0.1, 1.5, 4, 107.84, 0.01, 0.3, None if seed else 9.0)
    return Found(times, curves, numbers)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({}, [True, True, True, True, True]),
        ({"continuous, medium": (2.1, 2.1, 2.1)}, [False, True, True, True, True]),
        ({"continuous, medium": (1.9, 1.9, 2.1)}, [None, True, True, True, True]),
        ({"continuous, large": (6.0, 6.0, 6.0)}, [True, True, False, True, True]),
        ({"continuous, large": (3.0, 6.0, 6.0)}, [True, True, None, True, True]),
        ({"continuous, judge": (3.0, 3.0, 3.0)}, [True, True, True, False, True]),
    ],
)
def test_verdicts_follow_from_the_times(steps: dict[str, Any], expected: list[bool | None]):
    assert [verdict.holds for verdict in verdicts(made_up(**steps))] == expected


def test_nothing_is_as_good_as_what_learned_nothing():
    """A synchronous run, one that recomputes."""
    for name, index in ((f"{runs.SYNC}, {runs.MEDIUM}", 1), (runs.RECOMPUTED, 4)):
        found = made_up()
        found.numbers[name, 1] = replace(found.numbers[name, 1], first_gold=0.77)  # it ends at 0.81
        assert [verdict.holds for verdict in verdicts(found)] == [None if at == index else True for at in range(5)]


def test_the_section_has_a_row_for_every_case():
    section = told(made_up(), hardware="GPU", transport="40 versions, 1.0 ms each")
    tables = list(section.tables.values())
    assert [len(table.splitlines()) - 2 for table in tables] == [10, 2, 6]
    assert "| 27 M | continuous | 1.616 (0.016) | 1.25 (0.00) | 20% | 10% | 1.50 | 0.810 (0.010) |" in tables[0]
    assert "| 27 M, judge | continuous | 1.717 (0.017) | 1.76 (0.00) |" in tables[0]
    assert "| oldest_first (ours) | 50 (0) | 10.0% | 1.50 (0.00) | 4 | +7% | 1 of 3 arrive |" in tables[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_same_runs_on_a_cpu_at_toy_size(tmp_path: Path, monkeypatch):
    """Warm start, then every kind of overlap and schedule from its checkpoint, read as the GPU's will be."""
    monkeypatch.chdir(Path(experiment.__file__).parents[2])
    lab = Lab(tmp_path)
    dataset = task.write("equal", tmp_path)
    cpu: dict[str, Any] = {
        "groups_per_step": 2,
        "prompts": {"num_train": 700, "num_eval": 100},
        "trainer": {"device": "cpu", "precision": "float32"},
        "generator": {
            "device": "cpu", "precision": "float32", "num_slots": 16, "kv_cache_gb": None, "max_new_tokens": 16
        },
    }  # fmt: skip
    tiny = {"hidden_size": 64, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "intermediate_size": 64}
    start = lab.run(runs.start("small", dataset).with_overrides(**cpu, model=tiny, warm_start={"steps": 5}))
    queue = {"schedule": {"queue_groups": 8}}
    for name in ("sync, co-located, medium", runs.KEPT, runs.RECOMPUTED, *runs.PEERS):
        spec = runs.run((name, 0), dataset=dataset, start=start / "model")
        spec = spec.with_overrides(**cpu, steps=4, **(queue if name == "finish_order" else {}))
        folder = lab.run(spec)
        curve = Curve(**experiment.read_curve(run=str(folder), metrics=metrics(folder), window=2))
        found = numbers_of(summary(folder), metrics(folder), curve)
        assert found.completions_per_s > 0
        assert 0 <= found.wasted_share < 1
        assert Times(**experiment.read_times(run=str(folder), cold=1, last=1)).step_s > 0
