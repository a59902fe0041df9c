"""What every metric of `metrics.jsonl` means, and its unit: the tables of docs/observability.md, TensorBoard's hints.

A name in angle brackets stands for one part of it: `staleness_tokens/lag_<k>`. The suite checks that no run writes what
is not here, and that nothing is here that the sources do not write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Metric:
    """`unit` is empty for what is a plain number. `meaning` is a phrase."""

    unit: str
    meaning: str

    @property
    def is_amount(self) -> bool:
        """Whether it is a share, a count or a time, which begin at 0: everything with a unit but what is in nats."""
        return bool(self.unit) and "nats" not in self.unit

    @property
    def in_words(self) -> str:
        return f"{self.meaning} ({self.unit})" if self.unit else self.meaning


SHARE = "share"
STEPS, TOKENS, SECONDS, NATS = "steps", "tokens", "s", "nats/token"

CATALOGUE: Mapping[str, Mapping[str, Metric]] = {
    "Every line": {
        "step": Metric("", "the step that was trained, from 0; of an evaluation, how many were"),
        "version": Metric("", "the version that the step made, `step` + 1; the one that was evaluated"),
        "wall_s": Metric(SECONDS, "since the run began, over attempts, without what a resume took back"),
    },
    "Rewards and completions of the step's batch": {
        "reward": Metric("", "mean reward of all completions, before advantages"),
        "reward_mean": Metric("", "the same, under the name that its deviation has"),
        "reward_std": Metric("", "its deviation over completions (over n)"),
        "reward_parts/<term>": Metric("", "mean of one term of the reward, unweighted, where it was given"),
        "score_mean": Metric("", "mean of what advantages are made of: the reward, changed by `loss.truncated`"),
        "completion_tokens_mean": Metric(TOKENS, "mean length of a completion"),
        "truncated_frac": Metric(SHARE, "completions that were cut at `generator.max_new_tokens` or a deadline"),
        "failed_frac": Metric(SHARE, "completions whose scoring failed"),
        "behaviour_surprisal_sum": Metric("nats", "mean of -log mu of a whole completion, mu being what sampled it"),
    },
    "Staleness": {
        "staleness_mean": Metric(STEPS, "mean over the sampled tokens of the batch, when they were consumed"),
        "staleness_max": Metric(STEPS, "the largest; at most `max_staleness`"),
        "staleness_tokens/lag_<k>": Metric(TOKENS, "tokens that were `<k>` steps old"),
        "staleness_updates_max": Metric("updates", "the largest distance in optimizer updates"),
        "version_lag_max": Metric(STEPS, "from the version of the replica that lags most to the one just made"),
        "version_lag_excess": Metric(STEPS, "how far that is beyond `max_staleness` + 1, from where a replica idles"),
    },
    "Loss and policy": {
        "loss": Metric("", "mean of the step's updates, each before it"),
        "entropy": Metric(NATS, "of the policy where it sampled, mean over tokens and updates"),
        "advantage_mean": Metric("", "over the tokens that are trained"),
        "advantage_std": Metric("", "its deviation"),
        "ratio": Metric("", "mean importance ratio r = pi / mu of a token, over updates"),
        "ratio_squared": Metric("", "mean of r^2"),
        "ratio_max": Metric("", "the largest r"),
        "ratio_share/<edge>": Metric(SHARE, "tokens with r from `<edge>` to the next edge"),
        "ess": Metric(SHARE, "effective sample size of the ratios, mean(r)^2 / mean(r^2)"),
        "kl_k1": Metric(NATS, "KL(mu, pi), estimated by -log r"),
        "kl_k2": Metric(NATS, "by (log r)^2 / 2: the `approxkl` of PPO's implementations"),
        "kl_k3": Metric(NATS, "by r - 1 - log r"),
        "logprob_diff_mean": Metric(NATS, "mean of abs(log pi - log mu)"),
        "logprob_diff_max": Metric(NATS, "the largest"),
        "logprob_diff_mean/lag_<k>": Metric(
            NATS, "before the first update, of completions sampled wholly `<k>` steps ago; lag 0 is the engines' own"
        ),
        "logprob_diff_max/lag_<k>": Metric(NATS, "the largest of these"),
        "clipped_frac": Metric(
            SHARE, "tokens (or completions, where ratios are theirs) that the loss clips or truncates"
        ),
        "clipped_low_frac": Metric(SHARE, "held back below, by a clip with two sides"),
        "clipped_high_frac": Metric(SHARE, "held back above"),
        "dual_clipped_frac": Metric(SHARE, "held by PPO's second clip, on negative advantages"),
        "sequence_ratio": Metric("", "mean ratio of whole completions, of losses that use it"),
        "sequence_ratio_max": Metric("", "the largest"),
        "proximal_ratio": Metric("", "decoupled PPO: mean of pi / proximal"),
        "correction_ratio": Metric("", "decoupled PPO: mean of proximal / mu"),
        "correction_ratio_max": Metric("", "the largest"),
        "correction_truncated_frac": Metric(SHARE, "tokens where it was above `max_ratio`"),
        "preference_accuracy": Metric(SHARE, "losses of pairs: pairs whose better half the policy prefers"),
        "preference_margin": Metric("", "by how much, in implicit reward"),
        "score_preferred": Metric("", "implicit reward of the better half"),
        "score_rejected": Metric("", "of the worse half"),
    },
    "Updates": {
        "grad_norm": Metric("", "of the policy, before clipping, mean over the step's updates"),
        "lr": Metric("", "learning rate of the last update"),
        "num_updates": Metric("updates", "with something to train on"),
        "tokens_trained": Metric(TOKENS, "targets of the loss, once, whatever the number of epochs"),
        "tokens_read": Metric(TOKENS, "rows of the microbatches of one epoch, prompts included"),
        "num_microbatches": Metric("", "of one epoch"),
        "padding_frac": Metric(SHARE, "rows of the microbatches that are nobody's"),
        "padded_layout_frac": Metric(SHARE, "what a padded layout of the same completions would waste"),
        "train_s": Metric(SECONDS, "of the training step on rank 0, without waiting for its batch"),
    },
    "Penalty for leaving the reference (with `kl.coef` or a loss that needs it)": {
        "kl_reference": Metric(NATS, "KL of the sampling policy and the reference, by `kl.estimator`"),
        "kl_reference_sum": Metric("nats", "the same summed over a completion, mean over completions"),
        "kl_coef": Metric("", "the coefficient, which `kl.target` adapts"),
        "kl_penalty": Metric("", "what it takes from a completion's score, where the penalty is in the reward"),
    },
    'Critic (with `loss.advantages = "gae"`)': {
        "value_loss": Metric("", "mean over the step's updates"),
        "value": Metric("", "mean value of a token during the updates"),
        "value_squared": Metric("", "mean of its square"),
        "value_before_mean": Metric("", "mean before the first update"),
        "value_before_std": Metric("", "its deviation"),
        "value_error": Metric("", "mean of (value - return)^2"),
        "value_clipped_frac": Metric(SHARE, "tokens whose value the clip holds"),
        "return": Metric("", "mean return of a token, the critic's target"),
        "return_squared": Metric("", "mean of its square"),
        "explained_variance": Metric("", "1 - value_error / variance of returns"),
        "critic_grad_norm": Metric("", "of the critic, as `grad_norm`"),
    },
    "The same under names that PPO's implementations publish (with a critic; [PPO's details](ppo_details.md))": {
        "objective/score": Metric("", "`score_mean`"),
        "objective/scores": Metric("", "`score_mean`"),
        "objective/score_total": Metric("", "with the penalty"),
        "objective/non_score_reward": Metric("", "the penalty, negative"),
        "objective/kl": Metric("nats", "`kl_reference_sum`"),
        "objective/kl_coef": Metric("", "`kl_coef`"),
        "objective/entropy": Metric("nats", "`behaviour_surprisal_sum`"),
        "objective/validation_score": Metric("", "mean reward of a greedy evaluation"),
        "ppo/loss/policy": Metric("", "`loss`"),
        "ppo/loss/policy_avg": Metric("", "`loss`"),
        "ppo/loss/value": Metric("", "`value_loss`"),
        "ppo/loss/value_avg": Metric("", "`value_loss`"),
        "ppo/loss/total": Metric("", "`loss` + `critic.coef` `value_loss`"),
        "ppo/policy/entropy": Metric(NATS, "`entropy`"),
        "ppo/policy/entropy_avg": Metric(NATS, "`entropy`"),
        "ppo/policy/approxkl": Metric(NATS, "`kl_k2`"),
        "ppo/policy/approxkl_avg": Metric(NATS, "`kl_k2`"),
        "ppo/policy/clipfrac": Metric(SHARE, "`clipped_frac`"),
        "ppo/policy/clipfrac_avg": Metric(SHARE, "`clipped_frac`"),
        "ppo/returns/mean": Metric("", "`return`"),
        "ppo/returns/var": Metric("", "variance of returns"),
        "ppo/val/vpred": Metric("", "`value`"),
        "ppo/val/error": Metric("", "`value_error`"),
        "ppo/val/clipfrac": Metric(SHARE, "`value_clipped_frac`"),
        "ppo/val/clipfrac_avg": Metric(SHARE, "`value_clipped_frac`"),
        "ppo/val/mean": Metric("", "`value_before_mean`"),
        "ppo/val/var": Metric("", "square of `value_before_std`"),
        "ppo/val/var_explained": Metric("", "`explained_variance`"),
        "ppo/val/ratio": Metric("", "`ratio`"),
        "ppo/val/ratio_var": Metric("", "variance of ratios"),
        "ppo/val/ratio_hist/<edge>": Metric(SHARE, "`ratio_share/<edge>`"),
        "ppo/val/advantage": Metric("", "`advantage_mean`"),
        "ppo/val/advantage_var": Metric("", "square of `advantage_std`"),
        "ppo/val/num_eos_tokens": Metric(TOKENS, "EOS tokens in the batch's completions"),
        "ppo/lr": Metric("", "`lr`"),
        "ppo/episode": Metric("completions", "trained so far"),
        "ppo/eps": Metric("completions/s", "since training began, in this attempt"),
        "elapsed/updates": Metric(STEPS, "so far"),
        "elapsed/episodes": Metric("completions", "so far"),
        "elapsed/steps/serial": Metric(TOKENS, "steps times `generator.max_new_tokens`"),
        "elapsed/steps/total": Metric(TOKENS, "completions times `generator.max_new_tokens`"),
        "elapsed/fps": Metric("tokens/s", "`elapsed/steps/total` of the last step over its time"),
        "elapsed/time": Metric(SECONDS, "`wall_s`"),
    },
    "Speed": {
        "step_s": Metric(SECONDS, "from the end of the step before to the end of this one"),
        "trained_tokens_per_s": Metric("tokens/s", "`tokens_trained` over `step_s`"),
        "generated_tokens_per_s": Metric("tokens/s", "sampled over the last ten reports of generators"),
    },
    "What happened since the step before": {
        "groups_scored": Metric("groups", "that got all their rewards"),
        "no_signal_frac": Metric(SHARE, "of these, those whose rewards gave no signal"),
        "scored_failed_frac": Metric(SHARE, "of their completions, those whose scoring failed, trained or not"),
        "failed_completions": Metric("completions", "whose scoring failed, since the run began"),
        "poisoned": Metric("completions", "that cannot be, and were made failed ones"),
        "dropped/no_signal": Metric("groups", "dropped since all their rewards were equal"),
        "dropped/failed": Metric("groups", "dropped since all their completions failed in scoring"),
        "dropped/stale": Metric("groups", "dropped for their age, by policies that do so"),
        "publish_skipped_frac": Metric(SHARE, "of the versions published, those for which no slot was free"),
        "wasted_tokens/<cause>": Metric(TOKENS, "sampled or read for nothing; causes above"),
        "time/<side>/<state>": Metric(SECONDS, "mean over the side's processes, of those that have reported"),
        "wait_frac/<process>/<state>": Metric(SHARE, "of its time as last reported, in a state of waiting"),
    },
    "Evaluations, in lines of their own": {
        "eval_reward": Metric("", "mean reward of the greedy answers to held-out prompts"),
        "eval_reward_parts/<term>": Metric("", "mean of one term of it, unweighted, where it was given"),
        "eval_accuracy": Metric(SHARE, "of these answers, those that `eval.measure` calls right; missing without one"),
        "eval_sampled_reward": Metric("", "`eval_reward` of answers sampled at temperature 1, at the ends of a run"),
        "eval_sampled_reward_parts/<term>": Metric("", "mean of one term of it"),
        "eval_sampled_accuracy": Metric(SHARE, "of these answers, those that are right"),
    },
}
"""Group -> name -> what it is, in the order of the documents."""

STAGES: Mapping[str, Mapping[str, Metric]] = {
    "`sft/metrics.jsonl`, a line per update": {
        "index": Metric("", "the update, from 0"),
        "loss": Metric(NATS, "of completion tokens, before the update"),
        "grad_norm": Metric("", "before clipping"),
        "lr": Metric("", "learning rate"),
        "num_tokens": Metric(TOKENS, "that were learned"),
        "train/sft/loss": Metric(NATS, "`loss`"),
        "train/sft/lr": Metric("", "`lr`"),
    },
    "`reward_model/metrics.jsonl`, a line per update": {
        "index": Metric("", "the update, from 0"),
        "loss": Metric("", "nats per preference, or squared error per rating, before the update"),
        "accuracy": Metric(SHARE, "preferences that the scores order as the label does"),
        "chosen_mean": Metric("", "mean score of the better candidate; of ratings, of all"),
        "rejected_mean": Metric("", "of the others; null of ratings"),
        "grad_norm": Metric("", "before clipping"),
        "lr": Metric("", "learning rate"),
        "num_preferences": Metric("", "of the update"),
        "train/loss": Metric("", "`loss`"),
        "train/accuracy": Metric(SHARE, "`accuracy`"),
        "train/lr": Metric("", "`lr`"),
        "train/rm/loss": Metric("", "`loss`"),
        "train/rm/accuracy": Metric(SHARE, "`accuracy`"),
        "train/rm/lr": Metric("", "`lr`"),
        "train/rm/chosen_rewards": Metric("", "`chosen_mean`"),
        "train/rm/rejected_rewards": Metric("", "`rejected_mean`"),
    },
}
"""What stages other than RL write to files of their own."""


@cache
def described(name: str) -> tuple[str, Metric] | None:
    """The catalogue's name for metric `name` of a run, and what it is; None for one that is not there."""
    for group in CATALOGUE.values():
        for known, metric in group.items():
            if _fits(known, name):
                return known, metric
    return None


def table(groups: Mapping[str, Mapping[str, Metric]]) -> Iterator[str]:
    """The lines of a Markdown table, a row with its name above each group."""
    yield "| metric | unit | what it is |"
    yield "|---|---|---|"
    for title, group in groups.items():
        yield f"| **{title}** | | |"
        for name, metric in group.items():
            yield f"| `{name}` | {metric.unit} | {metric.meaning} |"


def _fits(known: str, name: str) -> bool:
    """Whether `name` is `known` with its placeholders filled: numbers in `<k>` and `<edge>`, anything in `<term>`."""
    if known.endswith("<term>"):
        return name.startswith(known.removesuffix("<term>"))
    parts, others = known.split("/"), name.split("/")
    return len(parts) == len(others) and all(map(_part_fits, parts, others))


def _part_fits(part: str, other: str) -> bool:
    head, _, hole = part.partition("<")
    if not hole:
        return part == other
    filling = other.removeprefix(head)
    is_number = hole in ("k>", "edge>")
    digits = filling.replace(".", "", 1) if hole == "edge>" else filling
    return other.startswith(head) and (digits.isdigit() if is_number else bool(filling))
