"""Recipes of papers have the published numbers, and every command and call in their first lines resolves.

Sources: Asynchronous RLHF (arXiv:2410.18252v3) by tables and appendix, its code by file of mnoukhov/async_rlhf (`main`
for TL;DR, `dev` for GSM8K), LlamaRL (arXiv:2505.24034v1) by its sections.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from functools import reduce
from typing import Any

import pytest

from slipstream import cli
from slipstream.core.config import RunConfig
from slipstream.core.recipes import list_recipes
from slipstream.flags import parse
from slipstream.stages.named import resolve
from slipstream.trainer.loss_checks import check_loss

ONLINE_DPO_4L40S = "configs/onlinedpo_rho1b_gsm8k_4l40s_sync.yml"
TABLE_4 = "A.1, Table 4"
NO_ROBOTS = "A.2, Tables 5 to 7, and open-instruct's docs/algorithms/online_dpo.md"

PUBLISHED: dict[str, list[tuple[str, Any, str]]] = {
    "gsm8k": [
        ("model.path", "realtreetune/rho-1b-sft-GSM8K", f"{ONLINE_DPO_4L40S}: model_name_or_path"),
        ("groups_per_step", 3 * 6 * 14, f"{ONLINE_DPO_4L40S}: 3 ranks x per_device 6 x accumulation 14"),
        ("completions_per_group", 4, f"A.3, 'we sample and train on 4 completions'; {ONLINE_DPO_4L40S}: rloo_k"),
        ("steps", 129_024 // 252, f"{ONLINE_DPO_4L40S}: total_episodes 129024"),
        ("max_staleness", 1, "section 3: one step off-policy"),
        ("prompts.dataset", "openai/gsm8k", f"{ONLINE_DPO_4L40S}: dataset_name"),
        ("prompts.dataset_split", "train", "odpo_gsm8k.py"),
        ("prompts.num_train", 7_473, "all of the split"),
        ("prompts.template", "[MATH_TASK] Problem:\n{question}\n\nSolution:", "src/gsm8k_utils.py: GSM8k_PROMPT"),
        ("generator.max_new_tokens", 512, "A.3: 'generating 512 tokens'"),
        ("generator.temperature", 0.7, f"{ONLINE_DPO_4L40S}: temperature"),
        ("loss.name", "online_dpo", "A.3"),
        ("loss.params", {"beta": 0.1}, f"{ONLINE_DPO_4L40S}: beta"),
        ("loss.select", "best_and_worst", "A.3: 'choose the best and worst as our DPO pair'"),
        ("loss.skip_no_signal", False, "odpo_gsm8k.py trains on all groups"),
        ("loss.truncated", "keep", f"{ONLINE_DPO_4L40S}: non_eos_penalty False"),
        ("trainer.epochs", 1, f"{ONLINE_DPO_4L40S}: num_ppo_epochs"),
        ("trainer.minibatches", 1, f"{ONLINE_DPO_4L40S}: num_mini_batches"),
        ("trainer.optimizer.lr", 3e-6, f"{ONLINE_DPO_4L40S}: learning_rate"),
        ("trainer.optimizer.schedule", "linear", "transformers' default"),
        ("trainer.optimizer.max_grad_norm", 1.0, f"{ONLINE_DPO_4L40S}: max_grad_norm"),
        ("eval.measure", "exact_match", "A.3: pass@1"),
        ("eval.every", 512 // 4, f"{ONLINE_DPO_4L40S}: save_steps 0.25"),
        ("eval.sets.0.split", "test", "configs/generate_gsm8k.yml: split"),
        ("eval.sets.0.temperature", 0.0, "configs/generate_gsm8k.yml: temperature"),
        ("eval.sets.0.num_prompts", None, "the whole split"),
    ],
    "tldr": [
        ("stages", ["sft", "reward_model", "rl", "evaluate"], "A.1"),
        ("sft.path", "EleutherAI/pythia-1b-deduped", "configs/sft_pythia1b_tldr.yml: model_name_or_path"),
        ("sft.loss_on", "all", "sft.py: dataset_text_field = query_reference_response"),
        ("sft.epochs", 1, "configs/sft_pythia1b_tldr.yml: num_train_epochs"),
        ("sft.batch_size", 8 * 4, "configs/sft_pythia1b_tldr.yml: per_device 8 x accumulation 4"),
        ("sft.optimizer.lr", 1e-5, "configs/sft_pythia1b_tldr.yml: learning_rate"),
        ("sft.optimizer.schedule", "cosine", "configs/sft_pythia1b_tldr.yml: lr_scheduler_type"),
        (
            "reward_model.preferences",
            "mnoukhov/summarize_from_feedback_oai_preprocessing_1706381144_relabel_pythia6.9b",
            "configs/rm_pythia1b_tldr.yml: dataset_name",
        ),
        ("reward_model.epochs", 1, "configs/rm_pythia1b_tldr.yml: num_train_epochs"),
        ("reward_model.batch_size", 4 * 4, "configs/rm_pythia1b_tldr.yml: per_device 4 x accumulation 4"),
        ("reward_model.optimizer.lr", 1e-5, "configs/rm_pythia1b_tldr.yml: learning_rate"),
        ("reward_model.optimizer.schedule", "cosine", "configs/rm_pythia1b_tldr.yml: lr_scheduler_type"),
        ("reward_model.normalise", "none", "reward_modeling.py"),
        (
            "prompts.dataset",
            "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144",
            "configs/onlinedpo_pythia1b_tldr.yml: dataset_name",
        ),
        ("prompts.max_prompt_tokens", 512, TABLE_4),
        ("groups_per_step", 512, f"{TABLE_4}: batch size"),
        ("completions_per_group", 2, "A.1: k = 2"),
        ("steps", 131_072 // 512, f"{TABLE_4}: total episodes; section 3: 256 steps"),
        ("max_staleness", 1, "section 3: one step off-policy"),
        ("generator.max_new_tokens", 128, f"{TABLE_4}: response length (53 in the code)"),
        ("generator.temperature", 0.7, f"{TABLE_4}: generation temperature"),
        ("loss.params", {"beta": 0.1}, "A.1: Online DPO sets beta = 0.1"),
        ("loss.truncated", "penalty", f"{TABLE_4}: penalty reward for completions without an EOS token"),
        ("loss.truncation_reward", -1.0, f"{TABLE_4}: -1.0"),
        ("trainer.epochs", 1, f"{TABLE_4}: number of PPO epochs"),
        ("trainer.optimizer.lr", 3e-6, f"{TABLE_4}: learning rate"),
        ("trainer.optimizer.schedule", "linear", f"{TABLE_4}: learning rate schedule"),
        ("trainer.optimizer.max_grad_norm", 1.0, "transformers' default, which the trainer of one vLLM applies"),
        ("gold.models.0.path", "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr", "configs/evaluate_tldr.yml"),
        ("eval.sets.0.split", "validation", "generate_for_eval.py: split"),
        ("eval.every", 256 // 4, "configs/onlinedpo_pythia1b_tldr.yml: save_steps 0.25"),
        ("evaluation.temperature", 0.01, "configs/generate_tldr.yml: temperature 0.010001"),
    ],
    "no_robots": [
        ("stages", ["sft", "preferences", "reward_model", "rl", "evaluate"], "A.2"),
        ("sft.path", "meta-llama/Llama-3.1-8B", "A.2"),
        ("sft.batch_size", 128, NO_ROBOTS),
        ("sft.epochs", 2, NO_ROBOTS),
        ("sft.optimizer.lr", 5e-6, NO_ROBOTS),
        ("sft.optimizer.schedule", "linear", NO_ROBOTS),
        ("sft.optimizer.warmup_updates", 5, f"{NO_ROBOTS}: ratio 0.03 of 2 x 75 updates"),
        ("sft.optimizer.weight_decay", 0.0, NO_ROBOTS),
        ("preferences.samples_per_prompt", 3, "A.2: 'we generate 3 demonstrations'"),
        ("preferences.temperature", 0.7, "A.2: 'with temperature 0.7'"),
        ("preferences.with_reference", True, "A.2: 'totaling 4 generations'"),
        ("preferences.max_per_prompt", None, "A.2: '6 pairs (4 choose 2)'"),
        ("preferences.labels", "judge", "A.2: 'use GPT-4o as a judge'"),
        ("preferences.num_prompts", 9_500, "all of the split"),
        ("judge.model", "gpt-4o", "A.2"),
        ("reward_model.path", None, "A.2: 'from the LLaMA 3.1 SFT checkpoint': model.path"),
        ("reward_model.optimizer.lr", 3e-6, NO_ROBOTS),
        ("reward_model.optimizer.eps", 1e-5, "open-instruct, reward_modeling.py: eps"),
        ("reward_model.optimizer.schedule", "linear", NO_ROBOTS),
        ("reward_model.batch_size", 256, NO_ROBOTS),
        ("reward_model.epochs", 1, NO_ROBOTS),
        ("model.path", "stage:sft", "A.2"),
        ("groups_per_step", 256, NO_ROBOTS),
        ("completions_per_group", 2, NO_ROBOTS),
        ("steps", 100_000 // 256, "A.2: '100,000 episodes'"),
        ("prompts.max_prompt_tokens", 512, NO_ROBOTS),
        ("generator.max_new_tokens", 1024, "A.2: 'up to 1024 tokens'"),
        ("generator.temperature", 0.7, NO_ROBOTS),
        ("loss.params", {"beta": 0.03}, NO_ROBOTS),
        ("loss.truncation_reward", -10.0, NO_ROBOTS),
        ("trainer.epochs", 1, NO_ROBOTS),
        ("trainer.optimizer.lr", 8e-7, NO_ROBOTS),
        ("trainer.optimizer.eps", 1e-5, "open-instruct, online_dpo_vllm_thread.py: eps"),
        ("trainer.optimizer.schedule", "linear", NO_ROBOTS),
        ("eval.sets.0.split", "test", "A.2, Table 8: 'on the test split'"),
    ],
    "math": [
        ("groups_per_step", 512, "8.2, Table 3: 512 unique prompts"),
        ("completions_per_group", 4, "8.2, Table 3: n = 4"),
        ("prompts.dataset_split", "train", "8.1: 'trained on the MATH dataset'"),
        ("prompts.num_train", 7_500, "Hendrycks et al. (2021): training problems"),
        ("loss.name", "aipo", "8.3"),
        ("loss.skip_no_signal", False, "8.2: a batch is 512 prompts x 4; no filter is named"),
        ("trainer.optimizer.lr", 2e-7, "8.1: 'fixed learning rate'"),
        ("trainer.optimizer.schedule", "constant", "8.1: 'fixed learning rate'"),
        ("rewards.terms.0.function", "math", "8.3: 'sympy score', 'the same score as reward'"),
        ("eval.measure", "math", "8.3"),
        ("eval.sets.0.name", "math500", "8.1, 8.3"),
        ("eval.sets.1.name", "gsm8k", "8.1, 8.3"),
        ("eval.sets.2.name", "math_test", "8.1: 'the full test split'"),
        ("eval.sets.2.num_prompts", None, "8.1: 'the full test split'"),
    ],
}


def value_at(config: RunConfig, field: str) -> Any:
    return reduce(lambda at, name: at[int(name)] if name.isdigit() else getattr(at, name), field.split("."), config)


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_the_published_numbers(recipe: str) -> None:
    config = resolve(recipe)
    wrong = {
        f"{field} ({source})": (found, value)
        for field, value, source in PUBLISHED[recipe]
        if (found := value_at(config, field)) != value
    }
    assert not wrong, "found, published"


COMMANDS = [
    line.removeprefix("#").strip()
    for recipe in list_recipes()
    for line in recipe.path.read_text(encoding="utf-8").splitlines()
    if line.startswith(("#     slipstream run ", "#     slipstream.run("))
]


def resolved(command: str) -> RunConfig:
    """The configuration that a command, or a call, runs."""
    if (call := re.fullmatch(r'slipstream\.run\("(\w+)", overrides=(\{.*\})\)', command)) is not None:
        return resolve(call[1], ast.literal_eval(call[2]))
    argv = shlex.split(command)[2:]
    return resolve(argv[0], parse(cli.RunOptions, argv, cli.run_command).overrides)


def test_variants_are_shown() -> None:
    shown = {(config.recipe, config.loss.name) for config in map(resolved, COMMANDS)}
    recipes, methods = ("gsm8k", "tldr", "no_robots", "math"), ("ppo", "proximal_rloo", "best_of_n")
    assert set(itertools.product(recipes, methods)) <= shown


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_first_lines_show_can_be_run(command: str) -> None:
    config = resolved(command)
    check_loss(config)
    if config.loss.name == "ppo":
        assert config.critic.optimizer == config.trainer.optimizer, "both codes have one optimizer for both models"
    if config.loss.name == "ppo" and config.recipe != "math":
        assert config.critic.score_place == "after_last", "both codes: actual_end is the place after the last token"
    if config.recipe == "no_robots" and config.loss.name == "ppo":
        assert config.kl.coef == 0.01, "A.2, PPO"
        assert config.loss.whiten_advantages == "batch", "open-instruct, ppo_vllm_thread.py: masked_whiten"
    if (config.recipe, config.loss.name) in (("gsm8k", "ppo"), ("tldr", "ppo")):
        assert config.kl.coef == 0.05, "Table 4; configs/ppovllm_rho1b_gsm8k.yml"
        assert (config.critic.coef, config.critic.gamma, config.critic.lam, config.critic.clip) == (0.1, 1.0, 0.95, 0.2)
    if (config.recipe, config.loss.name) == ("gsm8k", "ppo"):
        found = (config.trainer.epochs, config.groups_per_step, config.completions_per_group)
        assert found == (2, 32, 8), "configs/ppovllm_rho1b_gsm8k.yml: rloo_k 8 of 2 x 128"
    if config.loss.name == "best_of_n":
        lr = 2e-7 if config.recipe == "math" else 1e-6
        assert (config.trainer.optimizer.lr, config.completions_per_group) == (lr, 2), "A.1: Best-of-2"
