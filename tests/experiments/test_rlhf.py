"""The shared pipeline: N changes when completions are sampled and nothing else; numbers are those of the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.lab import Lab, Made, Spec
from experiments.rlhf import (
    LOSSES,
    NAMES,
    SIZES,
    Cell,
    Ended,
    Outcome,
    Pipeline,
    Run,
    Step,
    Tuned,
    all_of,
    cell_of,
    ended,
    gold_score,
    is_greater_by_seed,
    is_near_by_seed,
    mean_by_seed,
    oldest_update,
    reward_accuracy,
    shares_kept,
    trodden,
)
from slipstream.core.recipes import resolve
from slipstream.rewards.functions import BUILTINS
from slipstream.rewards.protocol import RewardJob

PIPELINE = Pipeline()


def without(tables: dict, *dotted: str) -> dict:
    """A copy that lacks some fields."""
    kept = json.loads(json.dumps(tables))
    for path in dotted:
        *sections, name = path.split(".")
        inner = kept
        for section in sections:
            inner = inner[section]
        del inner[name]
    return kept


@pytest.fixture
def lab(tmp_path) -> Lab:
    return Lab(tmp_path / "lab")


@pytest.mark.parametrize("loss", LOSSES)
def test_all_n_train_on_as_many_samples_in_as_many_updates(lab, loss):
    """Update j of a step is j updates away from the weights that its minibatch was sampled with."""
    first = PIPELINE.rl(lab, Run(loss, 1, seed=2)).config()
    assert (first.host, first.seed, first.loss.name) == ("inline", 2, LOSSES[loss]["loss"]["name"])
    for num in (2, 4, 8, 16, 64):
        config = PIPELINE.rl(lab, Run(loss, num, seed=2)).config()
        assert config.max_staleness == 0
        assert (config.updates_per_step, config.trainer.epochs) == (num, 1)
        assert config.steps * config.updates_per_step == first.steps == 192
        assert config.groups_per_step == 32 * num
        assert config.completions_per_group == 2
        changed = ("steps", "groups_per_step", "trainer.minibatches")
        assert without(config.model_dump(), *changed) == without(first.model_dump(), *changed)


def test_an_n_that_leaves_a_rest_is_refused(lab):
    with pytest.raises(ValueError, match="192 updates are no whole number of steps of 7"):
        PIPELINE.rl(lab, Run("ppo", 7, seed=0))


def test_nothing_is_whitened_or_penalised_across_minibatches(lab):
    """Else N would change the advantages, not only their age."""
    for loss in LOSSES:
        config = PIPELINE.rl(lab, Run(loss, 8, seed=0)).config()
        assert config.loss.whiten_advantages in ("no", "minibatch")
        assert config.kl.target is None
        assert not config.loss.skip_no_signal
        assert config.kl.coef == (0.0 if loss == "online_dpo" else 0.1)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_run_keeps_to_be_measured_changes_nothing_else(lab, loss):
    """And only where no penalty in the reward measures the KL itself; nobody else gets it (`idle_compute`)."""
    usual, measured = (PIPELINE.rl(lab, Run(loss, 16, seed=1, measured=wanted)) for wanted in (False, True))
    every = [spec.config().observe.tokens_every for spec in (usual, measured)]
    assert every == [0, int(loss in ("online_dpo", "best_of_2"))]
    same = [without(spec.config().model_dump(), "observe.tokens_every") for spec in (usual, measured)]
    assert same[0] == same[1]
    assert PIPELINE.rl(lab, Run(loss, 16, seed=1)) == usual


def test_every_loss_differs_from_ppo_in_its_own_fields_only(lab):
    ppo = PIPELINE.rl(lab, Run("ppo", 4, seed=0)).config().model_dump()
    for loss in LOSSES.keys() - {"ppo"}:
        ours = PIPELINE.rl(lab, Run(loss, 4, seed=0)).config().model_dump()
        of_best = ("kl.place", "kl.estimator", "trainer.optimizer.lr")
        own = ("loss", "kl.coef", *(of_best if loss == "best_of_2" else ()))
        assert without(ours, *own) == without(ppo, *own)
        assert ours["loss"]["name"] != "ppo"
    assert NAMES.keys() == LOSSES.keys()


def test_runs_begin_with_the_models_of_their_seed_and_sizes(lab):
    judges = {(seed, size): lab.place(PIPELINE.judge(lab, seed, size)) for seed in (0, 1) for size in SIZES}
    policies = {size: lab.place(PIPELINE.sft(lab, size)) for size in SIZES}
    assert len({*judges.values(), *policies.values()}) == 9
    config = PIPELINE.rl(lab, Run("online_dpo", 4, seed=1, policy="L", reward_model="S")).config()
    assert config.model.path == config.kl.reference == str(policies["L"] / "sft" / "model")
    assert [model.path for model in config.rewards.models] == [str(judges[1, "S"] / "reward_model" / "model")]
    assert config.critic.path == config.rewards.models[0].path
    assert config.stages == ["rl", "evaluate"]


def test_reward_models_of_all_sizes_learn_from_the_same_pairs(lab):
    usual = PIPELINE.judge(lab, 1).config()
    assert usual.stages == ["preferences", "reward_model"]
    assert (usual.seed, usual.reward_model.preferences, usual.reward_model.path) == (1, None, None)
    for size in ("S", "L"):
        config = PIPELINE.judge(lab, 1, size).config()
        assert config.stages == ["reward_model"]
        pairs = lab.place(PIPELINE.judge(lab, 1)) / "preferences" / "preferences.jsonl"
        assert config.reward_model.preferences == str(pairs)
        assert config.reward_model.path == str(lab.place(PIPELINE.sft(lab, size)) / "sft" / "model")
        assert config.model.path == usual.model.path == str(lab.place(PIPELINE.sft(lab)) / "sft" / "model")


def test_the_usual_policy_is_the_recipes_from_more_data(lab):
    ours, recipe = PIPELINE.sft(lab).config().model_dump(), resolve("tldr_mini").model_dump()
    more = ("prompts.num_train", "sft.steps", "sft.num_demonstrations", "preferences.num_prompts")
    other = ("host", "stages", "critic.path", "rewards.models", *more)
    assert without(ours, *other) == without(recipe, *other)
    widths = {size: PIPELINE.sft(lab, size).config().model.hidden_size for size in SIZES}
    assert widths == {"S": 64, "M": recipe["model"]["hidden_size"], "L": 256}


def test_models_are_made_before_what_begins_with_them_the_usual_size_first(lab, monkeypatch):
    made: list[list[str]] = []
    monkeypatch.setattr(lab, "run_all", lambda specs: made.append([spec.name for spec in specs]) or [])
    PIPELINE.make(lab, [0, 1], [PIPELINE.rl(lab, Run("ppo", 1, seed=0))], policies=["L"], reward_models=["S", "M"])
    assert made == [
        ["rlhf sft M", "rlhf sft S", "rlhf sft L"],
        ["rlhf reward model M seed 0", "rlhf reward model M seed 1"],
        ["rlhf reward model S seed 0", "rlhf reward model S seed 1"],
        ["rlhf ppo N=1 policy M reward model M seed 0"],
    ]


def test_fine_tuning_may_begin_with_an_easier_one(lab, monkeypatch):
    hard = Pipeline(overrides={"prompts": {"template": "read: {question}>"}}, easier=PIPELINE)
    assert hard.sft(lab, "L").config().sft_model.path == str(lab.place(PIPELINE.sft(lab, "L")) / "sft" / "model")
    made: list[list[Spec]] = []
    monkeypatch.setattr(lab, "run_all", lambda specs: made.append(list(specs)) or [])
    hard.make(lab, [0], [], policies=["L"])
    assert made[:2] == [[pipeline.sft(lab, size) for size in ("M", "L")] for pipeline in (PIPELINE, hard)]


def evaluation(before: float, after: float, kl: float = 1.5) -> dict:
    def moment(win_rate: float, kl: float) -> dict:
        return {
            "gold": {"win_rate": {"mean": win_rate}, "strict_win_rate": 0.0, "mean_score": win_rate + 0.25},
            "drift": {
                "kl": {"per_sequence": {"mean": kl}, "per_token": 0.0},
                "perplexity": {"per_response_token": {"mean": 4.0}, "per_text_token": {"mean": 1.2}},
            },
        }

    return {"before": moment(before, 0.0), "after": moment(after, kl)}


class MadeUp(Lab):
    """Runs of RL gain 0.25 for each seed more, and leave no steps; what they begin with leaves nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[str] = []

    def run_all(self, specs):
        for spec in specs:
            self.asked.append(spec.name)
            config, folder = spec.config(), self.place(spec)
            folder.mkdir(exist_ok=True)
            self.used[folder] = Made("run", 60.0, 1, 2, "a processor", "0123456789")
            found = evaluation(0.25, 0.5 + 0.25 * config.seed, kl=config.seed)
            (folder / "evaluation.json").write_text(json.dumps(found))
            steps = [{"step": 0, "ess": 0.5, "kl_reference_sum": 0.123456}, {"step": 1, "eval_accuracy": 0.1}]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
            (folder / "summary.json").write_text(json.dumps({"staleness": {"updates_max": 15}}))
            rollout = {"step": 0, "prompt": "*qz*r>", "completion": "q", "outcome": "trained"}
            (folder / "rollouts.jsonl").write_text(json.dumps(rollout))
        return [self.place(spec) for spec in specs]


def test_outcomes_are_kept_by_settings_and_not_by_folders(tmp_path):
    kept, tuned = tmp_path / "outcomes.jsonl", Tuned(2.0, 0.5)
    runs = [Run("ppo", 16, seed, tuned=tuned, measured=measured) for seed in (0, 1) for measured in (False, True)]
    here, there = MadeUp(tmp_path / "here"), MadeUp(tmp_path / "there")
    found = PIPELINE.outcomes(here, runs[:3], kept)
    assert here.asked.count("rlhf ppo N=16 policy M reward model M seed 0 lr x2 penalty x0.5") == 2
    assert found[runs[1]].steps == (Step(0.1235, pytest.approx(2 / 3, abs=1e-4), 1),)
    assert (found[runs[0]].steps, found[runs[2]].gain, found[runs[2]].oldest) == ((), 0.5, 15)
    assert PIPELINE.outcomes(there, runs, kept).items() >= found.items()
    assert [name for name in there.asked if "seed" in name] == [
        "rlhf reward model M seed 1",
        "rlhf ppo N=16 policy M reward model M seed 1 lr x2 penalty x0.5",
    ]
    assert there.cost().startswith("4 runs, 2 minutes on 2 cores of a processor")  # with the policy and its judge
    shorter = replace(PIPELINE, updates=96)
    assert len(shorter.outcomes(MadeUp(tmp_path / "shorter"), runs[:1], kept)) == 1
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len({row["settings"] for row in rows}) == len(rows) == 5
    assert not any(str(tmp_path) in json.dumps(row) for row in rows)


def test_without_a_file_every_run_is_made(tmp_path):
    lab = MadeUp(tmp_path)
    for _ in range(2):
        assert PIPELINE.outcomes(lab, [Run("rloo", 16, 0)])[Run("rloo", 16, 0)].ess == 0.5
    assert lab.asked.count("rlhf rloo N=16 policy M reward model M seed 0") == 2
    assert list(tmp_path.glob("*.jsonl")) == []


def test_a_cell_is_what_the_evaluations_of_its_seeds_say():
    found = [evaluation(0.25, after, kl=index) for index, after in enumerate((0.5, 0.75))]
    cell = cell_of([Outcome(ended(one, "before"), ended(one), 1.0, 0) for one in found])
    assert cell.ended == [Ended(0.5, 0.75, 0, 4.0), Ended(0.75, 1.0, 1, 4.0)]
    assert cell.began == [Ended(0.25, 0.5, 0.0, 4.0)] * 2
    assert cell.win_rates() == [0.5, 0.75]
    assert cell.gains() == [0.25, 0.5]


def test_other_files_are_read_as_well(tmp_path):
    steps = [{"step": 0, "kl_reference_sum": 0.0}, {"step": 1, "kl_reference_sum": 1.0}]
    lines = [{"step": 0, "eval_accuracy": 0.1}, *steps, {"step": 2, "eval_accuracy": 0.2}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    post = {"prompt": "*qz*r*dcju>", "outcome": "trained"}
    rollouts = [
        {"step": 1, "completion": "qrd", **post},
        {"step": 0, "completion": "zzz", **post},
        {"step": 0, "completion": "qr d", **post},
        {"step": 0, "completion": "qrd", **post, "outcome": "pending"},
    ]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rollouts)))
    assert trodden(tmp_path) == [Step(0.0, 0.5, 2), Step(1.0, 1.0, 1)]
    assert trodden(tmp_path, [0.25, 2.0]) == [Step(0.25, 0.5, 2), Step(2.0, 1.0, 1)]
    (tmp_path / "summary.json").write_text(json.dumps({"staleness": {"updates_max": 15}}))
    assert oldest_update(tmp_path) == 15
    (tmp_path / "reward_model").mkdir()
    (tmp_path / "reward_model" / "stage.json").write_text('{"held_out_accuracy": 0.75}')
    assert reward_accuracy(tmp_path) == 0.75


@pytest.mark.parametrize("summary", ["qrd", "drq", "jhkKwdPgz", "q q", "", "qrdqrd", "z*>"])
def test_gold_is_the_recipes(summary):
    """As the term of the recipe that is measured in its own runs says it."""
    post = "*qz*r*dcju>"
    (term,) = resolve("tldr_mini").gold.terms
    job = RewardJob(0, post, summary, [], "posts", None, {"key": "qrd"})
    assert gold_score(post, summary) == BUILTINS[term.function](**term.params)(job)


def cell(before: list[float], after: list[float]) -> Cell:
    return Cell(*([Ended(value, 0.0, 0.0, 0.0) for value in values] for values in (before, after)))


def test_shares_are_of_the_same_seeds_gain():
    on_policy = cell([0.25, 0.25], [0.75, 0.5])
    assert shares_kept(cell([0.25, 0.25], [0.5, 0.5]), on_policy) == [0.5, 1.0]
    assert shares_kept(cell([0.25, 0.25], [0.0, 0.25]), on_policy) == [-0.5, 0.0]
    assert shares_kept(on_policy, cell([0.25, 0.25], [0.75, 0.29])) is None  # one seed learned nothing to keep
    assert mean_by_seed([[0.0, 1.0], [1.0, 2.0]]) == [0.5, 1.5]


def test_five_seeds_count_when_they_agree():
    zeros = [0.0] * 5
    assert is_greater_by_seed([0.1, 0.2, 0.1, 0.3, 0.01], zeros) is True
    assert is_greater_by_seed([0.1, 0.2, 0.1, 0.3, -0.01], zeros) is None
    assert is_greater_by_seed([-0.1, -0.2, -0.1, -0.3, -0.01], zeros) is False


def test_near_is_a_matter_of_means_far_of_noise_as_well():
    zeros = [0.0] * 5
    assert is_near_by_seed([0.05, 0.03, 0.06, 0.04, 0.05], zeros, 0.05) is True
    assert is_near_by_seed([-0.1, -0.2, -0.1, -0.1, -0.1], zeros, 0.05) is False
    assert is_near_by_seed([0.1, 0.2, 0.1, 0.1, 0.1], zeros, 0.05) is False
    assert is_near_by_seed([0.2, 0.3, 0.2, 0.1, -0.1], zeros, 0.05) is None
    assert [all_of(answers) for answers in ([True, True], [True, None], [None, False])] == [True, None, False]
