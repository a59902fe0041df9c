"""Checks of the stages: their order, whose checkpoint stands for 'stage:sft', what dpo learns from, who labels."""

from __future__ import annotations

from slipstream.core.config import STAGE_PREFIX, STAGES, RunConfig, Stage, stage_of
from slipstream.core.errors import ConfigError
from slipstream.core.sections import ModelConfig
from slipstream.trainer.loss_checks import needs_reference


def check_order(config: RunConfig) -> None:
    """Raise ConfigError for stages that lack what they need of earlier ones, or name a checkpoint that none makes."""
    stages = config.stages
    if not stages or stages != [stage for stage in STAGES if stage in stages]:
        raise ConfigError("stages have one order", got=stages, allowed=f"some of {', '.join(STAGES)}")
    _check_paths(config)
    _check_shape(config)
    if config.model.lora.is_set and "rl" not in stages:
        raise ConfigError(
            "adapters are trained by the stage rl alone",
            got=f"{config.model.lora.in_words} (model.lora) with stages = {stages}",
            allowed="'rl' among stages, or no model.lora",
        )
    if "reward_model" in stages and "preferences" not in stages and config.reward_model.preferences is None:
        allowed = "the stage 'preferences' before it, or reward_model.preferences"
        raise ConfigError("a reward model needs preferences", got=f"stages = {stages}", allowed=allowed)
    if "dpo" in stages:
        _check_dpo(config)
    if "preferences" in stages:
        _check_labels(config)
    if "evaluate" in stages and not {"dpo", "rl"} & set(stages):
        raise ConfigError("the stage evaluate measures what rl has changed, or dpo", got=f"stages = {stages}")
    if "evaluate" in stages and config.num_held_out is not None:
        check_asked(config, config.num_held_out)
    if {"evaluate", "rl"} <= set(stages):
        _check_start(config)


def _check_start(config: RunConfig) -> None:
    """Raise ConfigError where nothing keeps the policy that RL starts from, with which `evaluate` compares."""
    is_kept = config.warm_start.steps > 0 and config.kl.reference is None and needs_reference(config)
    if (config.model.path is None or config.warm_start.steps) and not is_kept:
        raise ConfigError(
            "there is no checkpoint of the policy that RL starts from, with which the stage evaluate compares",
            got="a fresh or warm-started policy",
            allowed="model.path without warm_start.steps",
            hint="make it a stage of its own: stages = ['sft', 'rl', 'evaluate'] with model.path = 'stage:sft'",
        )


def trained_in_stages(config: RunConfig) -> list[ModelConfig]:
    """Return what the stages besides RL that train a model start from, the checkpoints of earlier ones as what these
    start from."""
    starts = {"dpo": config.dpo.path, "reward_model": config.reward_model.path}

    def source(path: str | None) -> ModelConfig:
        stage = stage_of(path)
        if stage == "sft":
            return config.sft_model
        if stage is not None and starts[stage] != path:
            return source(starts[stage] or config.first_checkpoint)
        return config.model.model_copy(update={"path": path})

    trained = [config.sft_model] if "sft" in config.stages else []
    return trained + [source(path or config.model.path) for stage, path in starts.items() if stage in config.stages]


def check_asked(config: RunConfig, held_out: int) -> None:
    """Raise ConfigError where the stage `evaluate` asks for more prompts than are held out."""
    asked, field = config.num_evaluated, "eval.sets[0]" if config.eval.sets else "prompts.num_eval"
    if asked is not None and asked > held_out:
        what = "the stage evaluate asks for more prompts than are held out"
        got = f"evaluation.num_prompts = {asked}, {field} = {held_out}"
        raise ConfigError(what, got=got, allowed=f"evaluation.num_prompts <= {field}")


def _check_paths(config: RunConfig) -> None:
    """Each field that names a checkpoint, with the stage that reads it and the stages that may make it."""
    named: list[tuple[str, str | None, Stage, tuple[str, ...]]] = [
        ("model.path", config.model.path, "preferences", ("sft", "dpo")),
        ("preferences.path", config.preferences.path, "preferences", ("sft",)),
        ("dpo.path", config.dpo.path, "dpo", ("sft",)),
        ("dpo.reference", config.dpo.reference, "dpo", ("sft",)),
        ("reward_model.path", config.reward_model.path, "reward_model", ("sft", "dpo")),
        ("kl.reference", config.kl.reference, "rl", ("sft", "dpo")),
        ("teacher.path", config.teacher.path, "rl", ("sft", "dpo")),
        ("critic.path", config.critic.path, "rl", ("sft", "dpo", "reward_model")),
        *(("rewards.models.path", term.path, "rl", ("reward_model",)) for term in config.rewards.models),
        *(("gold.models.path", term.path, "rl", ()) for term in config.gold.models),
    ]
    for field, path, user, makers in named:
        stage = stage_of(path)
        if stage is None:
            continue
        if stage not in makers:
            allowed = " or ".join(f"'{STAGE_PREFIX}{maker}'" for maker in makers)
            raise ConfigError(f"no stage makes what {field} needs", got=path, allowed=allowed or "a folder")
        if stage not in config.stages:
            what = f"{field} names a stage that this run does not go through"
            hint = f"add '{stage}' to stages before '{user}', or give the folder of its checkpoint"
            raise ConfigError(what, got=f"{path} with stages = {config.stages}", hint=hint)


def _check_dpo(config: RunConfig) -> None:
    """Raise ConfigError where the stage `dpo` has no pairs, nothing to start from, or is to start from itself."""
    stages, dpo = config.stages, config.dpo
    if dpo.preferences is None and "preferences" not in stages:
        allowed = "the stage 'preferences' before it, or dpo.preferences"
        raise ConfigError("the stage dpo needs preferences", got=f"stages = {stages}", allowed=allowed)
    if dpo.preferences is None and config.reward_model.candidates != 2:
        got = f"reward_model.candidates = {config.reward_model.candidates}"
        raise ConfigError("the stage dpo learns from pairs", got=got, allowed="2, or dpo.preferences")
    if stage_of(config.model.path) == "dpo":
        paths = {"dpo.path": dpo.path}
        if "preferences" in stages:
            paths["preferences.path"] = config.preferences.path
        for field in (field for field, path in paths.items() if path is None):
            what = f"{field} is model.path where it is not given, and that checkpoint is made from what it reads"
            got = f"no {field} with model.path = '{config.model.path}'"
            raise ConfigError(what, got=got, allowed="the checkpoint before, such as 'stage:sft'")
    if "evaluate" in stages and "rl" not in stages and (dpo.path or config.model.path) is None:
        what = "the stage evaluate compares two checkpoints, and dpo would start from a fresh model"
        raise ConfigError(what, got="no dpo.path and no model.path", allowed="one of them, such as 'stage:sft'")


def _check_shape(config: RunConfig) -> None:
    """Raise ConfigError for sizes of the stage sft where its model is given, or is the policy, which has [model]'s."""
    if not config.sft.shape.given:
        return
    is_policy = stage_of(config.model.path) == "sft"
    if config.sft.path is not None or is_policy:
        raise ConfigError(
            "[sft.shape] is of a fresh model that is not the policy",
            got="model.path = 'stage:sft'" if is_policy else f"sft.path = '{config.sft.path}'",
            hint="set the sizes of [model]" if is_policy else "a checkpoint has sizes of its own",
        )
    config.sft_model.check_heads()


def _check_labels(config: RunConfig) -> None:
    preferences, candidates = config.preferences, config.reward_model.candidates
    if candidates == 1:
        what = "the stage preferences compares completions and rates none"
        allowed = "2 or 4, or reward_model.preferences with ratings and no stage preferences"
        raise ConfigError(what, got="reward_model.candidates = 1", allowed=allowed)
    if preferences.labels == "judge" and not config.judge.is_given:
        what = "preferences.labels = 'judge' needs a judge"
        raise ConfigError(what, got="no judge.function and no judge.base_url", allowed="one of them")
    if preferences.labels == "judge" and candidates != 2:
        got = f"reward_model.candidates = {candidates}"
        raise ConfigError("a judge compares two completions", got=got, allowed="2, or preferences.labels = 'gold'")
    if preferences.labels == "gold" and any(stage_of(term.path) for term in config.gold_rewards.models):
        what = "preferences would be labelled by the reward model that is trained on them"
        raise ConfigError(what, got="no [gold], and rewards.models of a stage", allowed="gold.terms or gold.models")
    sampled = preferences.samples_per_prompt + preferences.with_reference
    if sampled < candidates:
        what = "too few completions of a prompt to compare"
        got = f"{sampled} with reward_model.candidates = {candidates}"
        raise ConfigError(what, got=got, hint="raise preferences.samples_per_prompt")
