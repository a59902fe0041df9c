"""`slipstream plan`: what it prints, what it writes, what it refuses; and that its recipes can be run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from measured_kit import measured, quickstart_shape
from rich.console import Console

import slipstream
from benchmarks.eta_figure import write_measured
from slipstream import cli
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.jobs.machines import lay_out
from slipstream.models.config import TransformerConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import initialise
from slipstream.models.preflight import check_policy
from slipstream.models.tokenizer import char_tokenizer
from slipstream.models.transformer import Transformer
from slipstream.plan import layouts
from slipstream.plan.answer import show
from slipstream.plan.planner import CLOSE
from slipstream.plan.question import subject_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--groups-per-step",
    "8",
    "--completions-per-group",
    "4",
    "--completion-tokens",
    "200",
    "--max-staleness",
    "2",
]
FOUR = ["plan", "llama-3.1-8b", "--gpus", "4", *SMALL, "--rows", "2", "--precision", "bfloat16"]
LEAST = ["plan", "llama-3.2-1b", "--gpus", "2", *SMALL, "--max-staleness", "1", "--rows", "1"]


def run_cli(*argv: str) -> int:
    try:
        return cli.main(argv)
    except SystemExit as left:
        return int(left.code or 0)


@pytest.fixture
def eta(tmp_path):
    """Curves of the quickstart's model, on which two cores are worth dividing."""
    made = measured(quickstart_shape(), train_s=lambda cores, b: 0.01 * (1 + 4 / b) / cores**0.3)
    write_measured(made, tmp_path / "eta.json")
    return tmp_path / "eta.json"


def test_what_is_printed_says_what_was_found_and_why(capsys):
    assert run_cli(*FOUR, "--price", "2") == 0
    told = " ".join(capsys.readouterr().out.split())
    for expected in (
        "llama-3.1-8b, 8.03 B parameters, on 4 H100",
        "8 prompts x 4 completions",
        "assumed, as not given: prompts of 512",
        "Best configurations under max_staleness k =",
        "$/1000",
        "Memory of the best, GB per GPU, of 73.6",
        "keys and values",
        "The best for each k",
        "is the smallest bound within 2%",
        "times as fast as the best synchronous configuration",
        "Does not fit:",
        "GB short",
    ):
        assert expected in told, expected


def test_rows_with_and_without_an_executor_share_a_table(capsys, monkeypatch):
    """The reference lies beside the trainer in some, on devices of its own in others; so does the reward model."""
    monkeypatch.setenv("COLUMNS", "120")
    others = ["--reference", "--reward-model", "llama-3.2-1b", "--groups-per-step", "16"]
    others += ["--max-stages", "1", "--precision", "bfloat16", "--max-staleness", "1"]  # fewer to compare
    assert run_cli("plan", "llama-3.2-3b", "--gpus", "8", *SMALL, *others, "--rows", "4") == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if "trainer" in line and "step s" in line)
    reference, reward_model = header.index("reference"), header.index("reward model")
    rows = lines[lines.index(header) + 1 :][:4]
    assert {row[reference : reference + 9].strip() for row in rows} == {"", "1"}
    assert {row[reward_model : reward_model + 9].strip() for row in rows} == {"1", "2"}
    idle = header.index("idle %") + len("idle %")
    for row in rows:  # one number for each executor that the row has
        executors = 3 + bool(row[reference : reference + 9].strip())
        assert len(row[:idle].split()[-1].split("/")) == executors


def test_json_has_it_all_and_python_says_the_same(capsys):
    assert run_cli(*LEAST, "--max-staleness", "2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    found = slipstream.make_plan(
        "llama-3.2-1b",
        gpus=2,
        groups_per_step=8,
        completions_per_group=4,
        completion_tokens=200.0,
        max_staleness=2,
        rows=1,
    )
    assert json.loads(json.dumps(found.to_dict())) == told
    best = told["rows"][0]
    assert best["step_s"] == found.plan.best.rehearsed.step_s
    assert best["tokens_per_s"] > 0
    assert set(best["idle"]) == set(best["executors"]) == {"trainer", "generator"}
    assert sum(executor["devices"] for executor in best["executors"].values()) <= 2
    for executor in best["executors"].values():
        assert sum(executor["memory_bytes"].values()) <= told["devices"]["usable_bytes"]
    assert best["staleness"]["max"] <= told["max_staleness"] <= 2
    assert best["usd_per_1000_steps"] is None  # nobody named a price
    assert told["synchronous"]["step_s"] > 0
    assert told["recipe"]["max_staleness"] == told["max_staleness"]


def test_adapters_are_planned_for_and_what_no_run_does_is_said(eta, capsys, tmp_path):
    """A run refuses them beside a critic, so that plan is an estimate without a recipe."""
    assert run_cli(*FOUR, "--lora-rank", "32", "--critic", "--rows", "1", "--max-staleness", "1") == 0
    printed = capsys.readouterr().out
    assert "adapters of 83.9 M numbers; a version has 0.336 GB instead of " in printed
    assert "no run can do this yet: adapters (model.lora) do not go together with a critic" in printed
    sizes = {"groups_per_step": 4, "completion_tokens": 100.0, "max_staleness": 1, "max_stages": 1, "rows": 1}
    beside = slipstream.make_plan("llama-3.1-8b", gpus=4, lora_rank=32, critic=True, **sizes)
    assert beside.to_dict()["recipe"] is None
    with pytest.raises(ConfigError, match="do not go together with"):
        beside.write_recipe(tmp_path / "out.toml")
    recipe = resolve("quickstart", {"model": {"lora": {"rank": 32, "targets": ["q_proj"]}}})
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(recipe.model_dump(exclude_none=True)), encoding="utf-8")
    found = slipstream.make_plan(str(tmp_path / "mine.toml"), gpus=2, groups_per_step=4, max_staleness=1, rows=1)
    told = found.to_dict()
    assert told["model"]["adapter_params"] == 3 * 32 * 256  # of the quickstart's three layers
    assert told["model"]["version_bytes"] == 4 * 3 * 32 * 256
    lora = told["recipe"]["model"]["lora"]
    assert (lora["rank"], lora["targets"]) == (32, ["q_proj"])
    found.write_recipe(tmp_path / "out.toml")
    planned = resolve(str(tmp_path / "out.toml"))
    assert (planned.trainer.device, planned.model.lora.rank) == ("cuda", 32)
    with pytest.raises(ConfigError, match="those of the weights that were trained"):
        slipstream.make_plan(str(tmp_path / "mine.toml"), measured=eta)


def test_stages_are_bounded_and_have_a_recipe_unless_no_run_can_do_them(monkeypatch, capsys, tmp_path):
    """70B in bfloat16 on nodes of two GPUs: within one no replica fits, and over four it waits for the network."""
    given = {"gpus": 32, "gpus_per_node": 2, "groups_per_step": 4, "completion_tokens": 50.0, "rows": 1}
    given |= {"max_staleness": 1, "precision": ("bfloat16",)}
    flat = slipstream.make_plan("llama-3.1-70b", **given, max_stages=1)
    monkeypatch.setattr(layouts, "DIVISIONS", {"pipeline_parallel": "no_such_axis"})  # as where a run refuses them
    staged = slipstream.make_plan("llama-3.1-70b", **given)
    assert flat.plan.best.plan.generator.is_flat
    assert staged.plan.best.plan.generator.pipeline_parallel > 1
    assert staged.plan.best.found.seconds < flat.plan.best.found.seconds / CLOSE
    assert flat.to_dict()["recipe"]["generator"]["replicas"] == flat.plan.best.plan.generator.replicas
    assert staged.to_dict()["recipe"] is None
    with pytest.raises(ConfigError, match="no_such_axis"):
        staged.write_recipe(tmp_path / "out.toml")
    show(staged, Console(width=200))
    printed = capsys.readouterr().out
    assert "no run can do this yet: unknown field 'no_such_axis'" in printed
    assert "(--max-stages 1 plans without stages)" in printed
    generator = staged.plan.best.plan.generator
    axes = f"{generator.tensor_parallel}x{generator.pipeline_parallel}x{generator.replicas} b{generator.slots}"
    assert axes in printed
    monkeypatch.undo()
    planned = resolve(replace(staged).recipe)  # which has not been asked before
    assert planned.generator.pipeline_parallel == generator.pipeline_parallel
    assert planned.generator.replicas * planned.generator.ranks == generator.devices
    for stages, refused in ((0, "a plan has rows, some staleness, and a stage"), (17, "--max-stages is out of range")):
        with pytest.raises(ConfigError, match=refused):
            slipstream.make_plan("llama-3.1-8b", gpus=8, max_stages=stages)


def test_a_price_is_that_of_the_whole_cluster():
    found = slipstream.make_plan(
        "llama-3.2-1b", gpus=2, price=3.0, groups_per_step=8, completion_tokens=100.0, max_staleness=1, rows=1
    )
    assert found.usd(36.0) == pytest.approx(1000 * 36 / 3600 * 2 * 3.0)


def test_nothing_loads_torch():
    """The answer comes at once: a plan is arithmetic."""
    code = (
        "import sys; from slipstream import cli; "
        f"assert cli.main({[*LEAST, '--json']!r}) == 0; "
        "sys.exit(3 if 'torch' in sys.modules or 'transformers' in sys.modules else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_recipe_for_gpus_resolves_and_has_jobs_on_just_those_gpus(tmp_path):
    out = tmp_path / "planned.toml"
    assert run_cli(*FOUR, "--reference", "--out", str(out)) == 0
    config = resolve(out)
    assert (config.groups_per_step, config.completions_per_group, config.weight_update) == (8, 4, "in_flight")
    assert config.trainer.device == config.generator.device == "cuda"
    assert config.trainer.precision == "bfloat16"
    assert config.kl.coef > 0
    groups = {job.kind: job for job in lay_out(config).groups}
    gpus = sum(job.machines.nodes * job.machines.gpus * (job.replicas or 1) for job in groups.values())
    assert gpus <= 4
    assert groups["generator"].replicas == config.generator.replicas
    assert groups["trainer"].machines.ranks * groups["trainer"].machines.nodes == config.trainer.ranks
    assert out.read_text(encoding="utf-8").startswith("# Planned for 4 H100")


def test_a_recipe_for_a_checkpoint_passes_the_checks_before_a_run(tmp_path):
    """A Hugging Face folder is planned for, and what comes out names it."""
    shape = TransformerConfig(
        family="llama",
        vocab_size=99,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=4096,
        tie_embeddings=True,
    )
    model = Transformer(shape)
    initialise(model, 0)
    save_model(model, tmp_path / "tiny", char_tokenizer())
    argv = ["plan", str(tmp_path / "tiny"), "--gpus", "2", *SMALL, "--max-staleness", "1", "--rows", "1"]
    assert run_cli(*argv, "--max-stages", "1", "--out", str(tmp_path / "tiny.toml")) == 0
    config = resolve(tmp_path / "tiny.toml")
    assert config.model.path == str(tmp_path / "tiny")
    check_policy(config)


def test_prompts_of_a_recipe_leave_room_for_the_longest_completion(tmp_path):
    """131,072 positions, of which completions may have 131,000: prompts of 60 in the mean are not let grow to 120."""
    lengths = [
        "--prompt-tokens",
        "60",
        "--completion-tokens",
        "200",
        "--p99-tokens",
        "800",
        "--max-new-tokens",
        "131000",
    ]
    argv = ["plan", "llama-3.1-8b", "--gpus", "8", "--groups-per-step", "2", "--max-staleness", "1", "--rows", "1"]
    assert run_cli(*argv, *lengths, "--max-stages", "1", "--out", str(tmp_path / "long.toml")) == 0
    config = resolve(tmp_path / "long.toml")
    assert (config.prompts.max_prompt_tokens, config.generator.max_new_tokens) == (72, 131000)


def test_lengths_of_a_run_and_a_cluster_by_file(tmp_path, capsys):
    line = {"ordinal": 0, "sample": 0, "step": 0, "outcome": "trained", "prompt_id": "", "task": "", "answer": None}
    line |= {"reward": 1.0, "parts": {}, "failure": None, "finish_reason": "stop", "versions": [], "replica": 0}
    line |= {"mean_behaviour_logprob": None, "started_s": 0.0, "finished_s": 0.0, "scored_s": 0.0}
    line |= {"prompt": 100 * "a", "completion": 400 * "b"}
    lines = [json.dumps(line | {"num_tokens": count}) + "\n" for count in (50, 100, 150)]
    (tmp_path / "rollouts.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "cluster.toml").write_text('gpus = 4\nname = "X1"\nmemory_gb = 200\n', encoding="utf-8")
    argv = ["plan", "llama-3.1-8b", "--lengths", str(tmp_path), "--cluster", str(tmp_path / "cluster.toml")]
    assert run_cli(*argv, "--groups-per-step", "8", "--max-staleness", "1", "--rows", "1", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["devices"] == {"unit": "GPU", "count": 4, "name": "X1", "usable_bytes": pytest.approx(0.92 * 200e9)}
    assert (told["lengths"]["completion_mean"], told["lengths"]["completion_longest"]) == (100.0, 150)
    assert told["lengths"]["prompt_mean"] == 25.0  # a quarter of a token per character, as in the completions
    assert told["batch"]["completions_per_group"] == 4


def test_a_recipe_for_this_machine_is_its_own_with_the_plan_s_layout(eta, tmp_path, capsys):
    out = tmp_path / "planned.toml"
    argv = ["plan", "quickstart", "--measured", str(eta), "--max-staleness", "1", "--rows", "1"]
    assert run_cli(*argv, "--out", str(out)) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "cores of this machine" in told
    config, quickstart = resolve(out), resolve("quickstart")
    check_policy(config)
    assert config.generator.device == config.trainer.device == "cpu"
    changed = {"max_staleness", "generator", "trainer", "weight_update"}
    assert {name for name in type(config).model_fields if getattr(config, name) != getattr(quickstart, name)} <= changed
    same = {"generator": {"num_slots", "replicas"}, "trainer": {"microbatch_tokens"}}
    for section, may_change in same.items():
        ours, theirs = getattr(config, section).model_dump(), getattr(quickstart, section).model_dump()
        assert {name for name in ours if ours[name] != theirs[name]} <= may_change
    assert config.trainer.optimizer == quickstart.trainer.optimizer


@pytest.mark.slow
def test_a_recipe_for_this_machine_runs(eta, tmp_path):
    out = tmp_path / "planned.toml"
    assert run_cli("plan", "quickstart", "--measured", str(eta), "--max-staleness", "2", "--out", str(out)) == 0
    overrides = {"steps": 4, "warm_start": {"steps": 2}, "eval": {"every": 0, "num_prompts": 8}}
    result = slipstream.run(out, overrides=overrides, out=tmp_path / "run", display=False)
    assert result.status == "done"
    assert result.summary["staleness"]["max"] <= resolve(out).max_staleness
    again = slipstream.make_plan(str(tmp_path / "run"), measured=eta, max_staleness=2)  # with the run's own lengths
    assert again.assumed == ()
    assert again.plan.workload.lengths.source.endswith("run")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_documents_show_what_is_printed():
    command = [sys.executable, "scripts/plan_examples.py", "--check", "docs/planning.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("plan", "a model is needed"),
        ("plan llama-3.1-9b --gpus 8", "did you mean 'llama-3.1-8b'?"),
        ("plan llama-3.1-8b", "there is nothing to plan for"),
        ("plan llama-3.1-8b --gpus 8 --gpu h101", "did you mean 'H100'?"),
        ("plan llama-3.1-8b --gpus 0", "a cluster has devices"),
        ("plan llama-3.1-8b --gpus many", "--gpus"),
        pytest.param("plan llama-3.1-405b --gpus 8", "does not fit on 8 H100", marks=pytest.mark.slow),  # seconds
        ("plan llama-3.1-8b --gpus 8 --groups-per-step 0", "--groups-per-step must be a positive number"),
        ("plan llama-3.1-8b --gpus 8 --p99-tokens 10", "lengths are out of order"),
        ("plan llama-3.1-8b --gpus 8 --max-new-tokens 200000", "do not fit the model"),
        ("plan llama-3.1-8b --gpus 8 --max-staleness 0", "some staleness"),
        ("plan llama-3.1-8b --gpus 8 --precision int8", "do not compute in int8"),
        ("plan llama-3.1-8b --gpus 8 --lengths nowhere", "has no rollouts.jsonl"),
        ("plan llama-3.1-8b --gpus 8 --out nowhere/a.toml", "cannot be written there"),
        ("plan llama-3.1-8b --gpus 8 --out a.json", "cannot be written there"),
        ("plan quickstart --measured nowhere.json", "'nowhere.json' cannot be read"),
        ("plan llama-3.1-8b --gpus 8 --cluster c.toml", "by a file or by flags"),
        ("plan llama-3.1-8b --gpus 8 --lora-rank 0", "--lora-rank must be a positive number"),
    ],
)
def test_bad_input_is_2_and_explained(argv, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_cli(*argv.split()) == 2
    printed = capsys.readouterr()
    assert told in " ".join(printed.err.split())
    assert "Traceback" not in printed.err
    assert list(tmp_path.iterdir()) == []


def test_curves_of_a_cpu_are_for_its_cores_and_those_of_a_gpu_for_gpus(eta, tmp_path):
    with pytest.raises(ConfigError, match="curves of a CPU say nothing of GPUs"):
        slipstream.make_plan("quickstart", gpus=8, measured=eta)
    with pytest.raises(ConfigError, match="does not have this model"):
        slipstream.make_plan("llama-3.2-1b", measured=eta)
    recipe = {"generator": {"device": "cuda"}, "prompts": {"tasks": [{"name": "chain_sum"}]}}
    base = resolve("quickstart").model_dump(exclude_none=True)
    base["generator"] |= recipe["generator"]
    (tmp_path / "gpu.toml").write_text(tomli_w.dumps(base), encoding="utf-8")
    with pytest.raises(ConfigError, match="recipe for GPUs"):
        slipstream.make_plan(str(tmp_path / "gpu.toml"), measured=eta)


def test_a_plan_that_takes_long_says_so_and_its_table_how_it_is_sorted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "SILENT_S", 0.01)
    for price, legend in (([], False), (["--price", "2.5"], True)):
        assert cli.main([*LEAST, *price]) == 0
        said, told = capsys.readouterr()
        assert told.startswith("planning: ")
        words = " ".join(said.split())
        assert "Sorted by step s, where these are alike within 0.5% by staleness." in words
        assert ("$/1000: dollars of 1,000 steps on all GPUs." in words) == legend


def test_a_name_that_is_no_model_brings_one_of_its_size() -> None:
    for named, near in (("qwen-7b", "qwen2.5-7b"), ("qwen3-1.8b", "qwen3-1.7b"), ("lama-3.1-70b", "llama-3.1-70b")):
        with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
            subject_of(named)
