"""What other trainers call our fields, and what they write into them: one table for recipes, flags and Python.

An entry is a field of ours and, behind a comma, what goes with it; "-" stands for no field, with what to do instead.
Fields and settings stand in backticks, as in a recipe; `sentence` writes them as flags for the command line.
TRL: GRPOConfig (1.16), RLOOConfig, PPOConfig and transformers' TrainingArguments. verl: `ppo_trainer.yaml` and its
asynchronous trainer. prime-rl: the configuration of `rl`. OpenRLHF: `train_ppo_ray`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_CLIP = 'with `loss.name = "grpo"`: `loss.params = { eps_low = 0.2, eps_high = 0.28 }`'
_DUAL_CLIP = 'with `loss.name = "ppo"`: `loss.params = { dual_clip = 3.0 }`'
_TRUNCATED_RATIO = (
    'which caps the ratio of policy to sampler: `loss.name = "aipo"`, `loss.params = { max_ratio = 4.0 }`'
)
_IN_LOSS = 'with `kl.place = "loss"` and `kl.estimator = "k3"`'
_BATCH = "in prompts: a step trains on that many times `completions_per_group` completions"
_PACKED = "in tokens: microbatches are packed"
_MINIBATCHES = "as their number, not their size: optimizer updates in a pass over the batch"
_RANKS = "over which the trainer is sharded (FSDP2)"
_OUT = "-, the folder of a run is given beside its fields: `slipstream run RECIPE --out DIR`, or out=DIR in Python"
_RESUME = "-, `slipstream run --resume DIR` goes on with a run"
_REWARD = "-, each `[[rewards.terms]]` of a recipe has a function and a weight"
_REWARD_MODEL = "-, each `[[rewards.models]]` of a recipe has a path and a weight"
_ADAPTERS = "-, all weights are trained: there are no adapters"
_BF16 = 'with `trainer.precision = "bfloat16"` and `trainer.device = "cuda"`'
_NO_FP16 = f"{_BF16}; there is no float16"
_SAMPLES = "-, `slipstream eval RUN --num-samples 8` samples several answers"
_VLLM_STARTED = '-, the run starts vLLM by itself: `generator.engine = "vllm"`'

FIELDS: dict[str, dict[str, str]] = {
    "TRL": {
        "learning_rate": "trainer.optimizer.lr",
        "lr_scheduler_type": "trainer.optimizer.schedule",
        "warmup_steps": "trainer.optimizer.warmup_updates",
        "warmup_ratio": "trainer.optimizer.warmup_updates, as a number of updates",
        "adam_beta1": "trainer.optimizer.betas",
        "adam_beta2": "trainer.optimizer.betas",
        "adam_epsilon": "trainer.optimizer.eps",
        "optim": "-, the optimizer is AdamW; `trainer.optimizer.lr` and the fields beside it set it",
        "max_steps": "steps",
        "num_train_epochs": "steps, of `groups_per_step` prompts each; prompts are shuffled anew when they end",
        "total_episodes": "steps, of `groups_per_step` times `completions_per_group` episodes each",
        "per_device_train_batch_size": f"groups_per_step, {_BATCH}",
        "generation_batch_size": f"groups_per_step, {_BATCH}",
        "steps_per_generation": f"trainer.minibatches, {_MINIBATCHES}",
        "gradient_accumulation_steps": f"trainer.microbatch_tokens, {_PACKED}",
        "gradient_checkpointing": "trainer.recompute",
        "bf16": f"trainer.precision, {_BF16}",
        "fp16": f"trainer.precision, {_NO_FP16}",
        "fsdp": f"trainer.ranks, {_RANKS}",
        "fsdp_config": f"trainer.ranks, {_RANKS}",
        "deepspeed": f"trainer.ranks, {_RANKS}",
        "output_dir": _OUT,
        "report_to": "trackers.names",
        "logging_steps": "-, every step is a line of metrics.jsonl in the run's folder",
        "save_steps": "trainer.checkpoint_every",
        "save_strategy": "trainer.checkpoint_every",
        "save_total_limit": "trainer.keep_checkpoints",
        "eval_steps": "eval.every",
        "eval_strategy": "eval.every",
        "per_device_eval_batch_size": "eval.num_slots",
        "resume_from_checkpoint": _RESUME,
        "push_to_hub": "-, the policy is written to model/ in the run's folder, in Hugging Face's format",
        "model_name_or_path": "model.path",
        "sft_model_path": "model.path",
        "trust_remote_code": "-, code of a checkpoint is never run",
        "use_peft": _ADAPTERS,
        "lora_r": _ADAPTERS,
        "peft_config": _ADAPTERS,
        "load_in_4bit": _ADAPTERS,
        "disable_dropout": "-, there is no dropout",
        "dataset_name": "prompts.dataset",
        "dataset_train_split": "prompts.dataset_split",
        "shuffle_dataset": "-, prompts are always shuffled, by `seed`",
        "remove_unused_columns": "-, rewards are given every column",
        "max_prompt_length": "prompts.max_prompt_tokens",
        "max_completion_length": "generator.max_new_tokens",
        "response_length": "generator.max_new_tokens",
        "stop_token": "generator.stop_token_ids",
        "num_generations": "completions_per_group",
        "rloo_k": "completions_per_group",
        "num_generations_eval": _SAMPLES,
        "num_iterations": "trainer.epochs",
        "num_ppo_epochs": "trainer.epochs",
        "num_mini_batches": "trainer.minibatches",
        "beta": f"kl.coef, {_IN_LOSS}",
        "kl_coef": 'kl.coef, with `kl.place = "reward"`',
        "epsilon": f"loss.params, {_CLIP}",
        "epsilon_high": f"loss.params, {_CLIP}",
        "cliprange": f"loss.params, {_CLIP}",
        "delta": f"loss.params, {_DUAL_CLIP}",
        "cliprange_value": "critic.clip",
        "vf_coef": "critic.coef",
        "loss_type": "loss.name, and `loss.reduction` for what the sum is divided by",
        "importance_sampling_level": 'loss.name, with `loss.name = "gspo"` for ratios of sequences',
        "scale_rewards": 'loss.advantages, with `loss.advantages = "group_mean"` for none',
        "multi_objective_aggregation": "loss.several_rewards",
        "mask_truncated_completions": 'loss.truncated, with `loss.truncated = "mask"`',
        "missing_eos_penalty": 'loss.truncation_reward, with `loss.truncated = "subtract"` and '
        "`loss.truncation_reward = -1.0`",
        "reward_funcs": _REWARD,
        "reward_weights": _REWARD,
        "reward_model_path": _REWARD_MODEL,
        "sync_ref_model": "-, the reference stays as `kl.reference` names it",
        "top_entropy_quantile": "-, the loss looks at all tokens",
        "use_adaptive_entropy": "-, `loss.entropy_coef` is fixed",
        "repetition_penalty": "-, samples come from the policy's own distribution",
        "generation_kwargs": "-, `generator.temperature` and the fields beside it",
        "use_vllm": 'generator.engine, with `generator.engine = "vllm"`',
        "vllm_mode": 'generator.engine, with `generator.engine = "vllm"`: vLLM runs in a process of its own',
        "vllm_gpu_memory_utilization": "generator.vllm.gpu_memory_utilization",
        "vllm_max_model_length": "generator.vllm.max_model_len",
        "vllm_tensor_parallel_size": "generator.vllm.engine_args, with "
        "`generator.vllm.engine_args = { tensor_parallel_size = 2 }`",
        "vllm_server_base_url": _VLLM_STARTED,
        "vllm_server_host": _VLLM_STARTED,
        "vllm_server_port": _VLLM_STARTED,
        "vllm_server_timeout": "generator.vllm.start_timeout_s",
        "vllm_importance_sampling_correction": f"loss.name, {_TRUNCATED_RATIO}",
        "vllm_importance_sampling_mode": f"loss.name, {_TRUNCATED_RATIO}",
        "vllm_importance_sampling_clip_max": f"loss.params, {_TRUNCATED_RATIO}",
        "vllm_importance_sampling_cap": f"loss.params, {_TRUNCATED_RATIO}",
        "off_policy_mask_threshold": "-, `max_staleness` bounds how old a token may be",
        "weight_sync_steps": "publish_every",
        "max_inflight_tasks": "generator.num_slots, of each replica",
        "log_completions": "-, every completion is a line of rollouts.jsonl in the run's folder",
        "max_tool_calling_iterations": "-, completions have one turn, without tools",
        "tools": "-, completions have one turn, without tools",
    },
    "verl": {
        "data.train_files": "prompts.dataset",
        "data.val_files": "prompts.eval_dataset",
        "data.train_batch_size": f"groups_per_step, {_BATCH}",
        "data.gen_batch_size": f"groups_per_step, {_BATCH}",
        "data.max_prompt_length": "prompts.max_prompt_tokens",
        "data.max_response_length": "generator.max_new_tokens",
        "data.prompt_key": "prompts.prompt_column",
        "data.truncation": "prompts.too_long",
        "data.filter_overlong_prompts": 'prompts.too_long, with `prompts.too_long = "drop"`',
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.model.lora_rank": _ADAPTERS,
        "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.recompute",
        "actor_rollout_ref.model.use_remove_padding": "-, microbatches are always packed",
        "actor_rollout_ref.actor.strategy": f"trainer.ranks, {_RANKS}",
        "actor_rollout_ref.actor.optim.lr": "trainer.optimizer.lr",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "trainer.optimizer.warmup_updates",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "trainer.optimizer.warmup_updates, "
        "as a number of updates",
        "actor_rollout_ref.actor.optim.warmup_style": "trainer.optimizer.schedule",
        "actor_rollout_ref.actor.optim.clip_grad": "trainer.optimizer.max_grad_norm",
        "actor_rollout_ref.actor.grad_clip": "trainer.optimizer.max_grad_norm",
        "actor_rollout_ref.actor.ppo_mini_batch_size": f"trainer.minibatches, {_MINIBATCHES}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": f"trainer.microbatch_tokens, {_PACKED}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.microbatch_tokens",
        "actor_rollout_ref.actor.use_dynamic_bsz": f"trainer.microbatch_tokens, {_PACKED}",
        "actor_rollout_ref.actor.ppo_epochs": "trainer.epochs",
        "actor_rollout_ref.actor.clip_ratio": f"loss.params, {_CLIP}",
        "actor_rollout_ref.actor.clip_ratio_low": f"loss.params, {_CLIP}",
        "actor_rollout_ref.actor.clip_ratio_high": f"loss.params, {_CLIP}",
        "actor_rollout_ref.actor.clip_ratio_c": f"loss.params, {_DUAL_CLIP}",
        "actor_rollout_ref.actor.tis_imp_ratio_cap": f"loss.params, {_TRUNCATED_RATIO}",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "loss.name",
        "actor_rollout_ref.actor.loss_agg_mode": "loss.reduction",
        "actor_rollout_ref.actor.entropy_coeff": "loss.entropy_coef",
        "actor_rollout_ref.actor.use_kl_loss": f"kl.coef, {_IN_LOSS}",
        "actor_rollout_ref.actor.kl_loss_coef": f"kl.coef, {_IN_LOSS}",
        "actor_rollout_ref.actor.kl_loss_type": "kl.estimator",
        "actor_rollout_ref.actor.fsdp_config": f"trainer.ranks, {_RANKS}",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "-, ranks of `trainer.tensor_parallel` share layers, "
        "not sequences",
        "actor_rollout_ref.rollout.name": "generator.engine",
        "actor_rollout_ref.rollout.mode": "max_staleness, `max_staleness = 0` is synchronous",
        "actor_rollout_ref.rollout.n": "completions_per_group",
        "actor_rollout_ref.rollout.response_length": "generator.max_new_tokens",
        "actor_rollout_ref.rollout.prompt_length": "prompts.max_prompt_tokens",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "generator.tensor_parallel",
        "actor_rollout_ref.rollout.max_num_seqs": "generator.num_slots",
        "actor_rollout_ref.rollout.max_num_batched_tokens": "generator.prefill_tokens",
        "actor_rollout_ref.rollout.calculate_log_probs": "-, the sampler's logprobs are always recorded",
        "actor_rollout_ref.rollout.val_kwargs.n": _SAMPLES,
        "algorithm.adv_estimator": "loss.advantages",
        "algorithm.gamma": "critic.gamma",
        "algorithm.lam": "critic.lam",
        "algorithm.use_kl_in_reward": 'kl.coef, with `kl.place = "reward"`',
        "algorithm.kl_ctrl.kl_coef": 'kl.coef, with `kl.place = "reward"`',
        "algorithm.kl_ctrl.target_kl": "kl.target",
        "algorithm.kl_ctrl.horizon": "kl.horizon",
        "algorithm.kl_penalty": "kl.estimator",
        "algorithm.norm_adv_by_std_in_grpo": 'loss.advantages, with `loss.advantages = "group_mean"` for false',
        "algorithm.filter_groups.enable": "loss.skip_no_signal",
        "critic.optim.lr": "critic.optimizer.lr",
        "critic.model.path": "critic.path",
        "reward_model.enable": _REWARD_MODEL,
        "reward_model.reward_manager": _REWARD,
        "custom_reward_function.path": _REWARD,
        "custom_reward_function.name": _REWARD,
        "trainer.total_epochs": "steps, of `groups_per_step` prompts each",
        "trainer.total_training_steps": "steps",
        "trainer.save_freq": "trainer.checkpoint_every",
        "trainer.test_freq": "eval.every",
        "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
        "trainer.val_before_train": "-, version 0 is always evaluated",
        "trainer.n_gpus_per_node": "trainer.ranks, and `generator.replicas` for the other side",
        "trainer.nnodes": "-, `slipstream launch` runs on several machines",
        "trainer.project_name": "trackers.project",
        "trainer.experiment_name": "trackers.run_name",
        "trainer.logger": "trackers.names",
        "trainer.default_local_dir": _OUT,
        "trainer.resume_mode": _RESUME,
        "async_training.staleness_threshold": "max_staleness, in steps; a budget of samples as there is "
        '`schedule.policy = "sample_budget"` with `schedule.staleness_threshold = 0.5`',
        "async_training.trigger_parameter_sync_step": "publish_every",
        "async_training.partial_rollout": 'weight_update, with `weight_update = "in_flight"`',
        "async_training.require_batches": f"groups_per_step, {_BATCH}",
    },
    "prime-rl": {
        "seq_len": "generator.max_new_tokens, beside `prompts.max_prompt_tokens` for the prompt",
        "model.name": "model.path",
        "wandb.project": 'trackers.project, with `trackers.names = ["wandb"]`',
        "wandb.name": 'trackers.run_name, with `trackers.names = ["wandb"]`',
        "ckpt.interval": "trainer.checkpoint_every",
        "ckpt.keep_last": "trainer.keep_checkpoints",
        "max_async_level": "max_staleness",
        "async_level": "max_staleness",
        "orchestrator.batch_size": f"groups_per_step, {_BATCH}",
        "orchestrator.group_size": "completions_per_group",
        "orchestrator.rollouts_per_example": "completions_per_group",
        "orchestrator.max_off_policy_steps": "max_staleness",
        "orchestrator.oversampling_factor": "-, `max_staleness` says how far generation runs ahead",
        "orchestrator.max_inflight_rollouts": "generator.num_slots, of each replica",
        "orchestrator.train.sampling.max_completion_tokens": "generator.max_new_tokens",
        "orchestrator.sampling.max_tokens": "generator.max_new_tokens",
        "orchestrator.env": "-, `prompts.dataset` or `[[prompts.tasks]]`, and `[[rewards.terms]]`",
        "orchestrator.train.env": "-, `prompts.dataset` or `[[prompts.tasks]]`, and `[[rewards.terms]]`",
        "orchestrator.eval.interval": "eval.every",
        "trainer.optim.lr": "trainer.optimizer.lr",
        "trainer.optim.max_norm": "trainer.optimizer.max_grad_norm",
        "trainer.scheduler.type": "trainer.optimizer.schedule",
        "trainer.scheduler.warmup_steps": "trainer.optimizer.warmup_updates",
        "trainer.model.ac": "trainer.recompute",
        "trainer.loss.type": "loss.name",
        "inference.parallel.tp": "generator.tensor_parallel",
        "inference_gpu_ids": "generator.replicas",
        "trainer_gpu_ids": "trainer.ranks",
    },
    "OpenRLHF": {
        "pretrain": "model.path",
        "reward_pretrain": _REWARD_MODEL,
        "remote_rm_url": _REWARD,
        "prompt_data": "prompts.dataset",
        "input_key": "prompts.prompt_column",
        "label_key": "prompts.answer_column",
        "apply_chat_template": "prompts.chat",
        "prompt_max_len": "prompts.max_prompt_tokens",
        "generate_max_len": "generator.max_new_tokens",
        "n_samples_per_prompt": "completions_per_group",
        "rollout_batch_size": "groups_per_step",
        "train_batch_size": f"trainer.minibatches, {_MINIBATCHES}",
        "micro_train_batch_size": f"trainer.microbatch_tokens, {_PACKED}",
        "max_epochs": "trainer.epochs",
        "num_episodes": "steps, of `groups_per_step` prompts each",
        "actor_learning_rate": "trainer.optimizer.lr",
        "critic_learning_rate": "critic.optimizer.lr",
        "lr_warmup_ratio": "trainer.optimizer.warmup_updates, as a number of updates",
        "l2": "trainer.optimizer.weight_decay",
        "eps_clip": f"loss.params, {_CLIP}",
        "eps_clip_low_high": f"loss.params, {_CLIP}",
        "dual_clip": f"loss.params, {_DUAL_CLIP}",
        "value_clip": "critic.clip",
        "lambd": "critic.lam",
        "advantage_estimator": "loss.advantages",
        "init_kl_coef": 'kl.coef, with `kl.place = "reward"`',
        "kl_target": "kl.target",
        "kl_horizon": "kl.horizon",
        "kl_estimator": "kl.estimator",
        "use_kl_loss": 'kl.place, with `kl.place = "loss"`',
        "entropy_loss_coef": "loss.entropy_coef",
        "dynamic_filtering": "loss.skip_no_signal",
        "async_train": "max_staleness, `max_staleness = 0` is synchronous",
        "async_queue_size": "max_staleness",
        "colocate_all_models": 'sync_placement, with `sync_placement = "colocated"`',
        "vllm_num_engines": "generator.replicas",
        "enable_vllm_is_correction": f"loss.name, {_TRUNCATED_RATIO}",
        "zero_stage": f"trainer.ranks, {_RANKS}",
        "packing_samples": "-, microbatches are always packed",
        "use_wandb": 'trackers.names, with `trackers.names = ["wandb"]`',
        "use_tensorboard": 'trackers.names, with `trackers.names = ["tensorboard"]`',
        "save_path": _OUT,
        "ckpt_path": _OUT,
        "load_checkpoint": _RESUME,
    },
    "others": {
        "max_tokens": "generator.max_new_tokens",
        "num_epochs": "trainer.epochs",
        "staleness": "max_staleness",
        "rewards_fn": _REWARD,
        "reward_fn": _REWARD,
        "reward": _REWARD,
    },
}

_ASYNC = (
    "'one_step' generates the next batch while this one is trained, 'bounded' several, and 'continuous' changes "
    "weights in the middle of completions, too"
)
_GRPO = '`loss.name = "grpo"`'
_DR_GRPO = f'{_GRPO} with `loss.advantages = "group_mean"` and `loss.reduction = "constant"`'
_BFLOAT16 = 'it is "bfloat16" here'
_FLOAT32 = 'it is "float32" here'
_PRECISIONS = {"bf16": _BFLOAT16, "fp32": _FLOAT32, "float": _FLOAT32}

VALUES: dict[str, dict[str, str]] = {
    "preset": {
        "async": _ASYNC,
        "asynchronous": _ASYNC,
        "off_policy": _ASYNC,
        "on_policy": "'sync' generates, trains and repeats",
        "synchronous": "'sync' generates, trains and repeats",
        "partial_rollout": "'continuous' changes weights in the middle of completions",
        "in_flight": "'continuous' changes weights in the middle of completions",
    },
    "loss.name": {
        "dapo": f'DAPO is {_GRPO} with its defaults: clip 0.2 and 0.28, `loss.reduction = "token"`, and '
        "`loss.skip_no_signal = true` for dynamic sampling",
        "dr_grpo": f"Dr. GRPO is {_DR_GRPO}",
        "bnpo": f'BNPO is {_GRPO} with `loss.reduction = "token"`',
        "vanilla": 'the clipped loss is `loss.name = "ppo"`',
        "ppo_clip": 'the clipped loss is `loss.name = "ppo"`',
        "policy_gradient": 'it is `loss.name = "reinforce"`, or `loss.name = "aipo"` with importance weights',
        "reinforce_plus_plus": '`loss.name = "ppo"` with `loss.advantages = "reward"` and '
        '`loss.whiten_advantages = "batch"`',
        "remax": 'ReMax is `loss.name = "reinforce"` with `loss.advantages = "greedy_baseline"`',
        "impala": 'V-trace is `loss.name = "aipo"` with `loss.advantages = "gae"` and `critic.vtrace = true`',
        "tis": 'truncated importance sampling is `loss.name = "aipo"` with `loss.params = { max_ratio = 4.0 }`',
        "icepop": 'masked importance sampling is `loss.name = "aipo_masked"` with `loss.params = { max_ratio = 4.0 }`',
        "dpo": 'DPO on samples of the policy is `loss.name = "online_dpo"` with `loss.select = "best_and_worst"` and '
        '`loss.advantages = "group_mean"`',
        "sigmoid": 'DPO on samples of the policy is `loss.name = "online_dpo"` with `loss.select = "best_and_worst"` '
        'and `loss.advantages = "group_mean"`',
        "ipo": 'IPO on samples of the policy is `loss.name = "online_ipo"` with `loss.select = "best_and_worst"` and '
        '`loss.advantages = "group_mean"`',
        "decoupled": 'it is `loss.name = "decoupled_ppo"`',
        "best_of_k": 'it is `loss.name = "best_of_n"` with `loss.select = "best"`',
        "sft": 'supervised fine-tuning is a stage: `stages = ["sft", "rl"]`, or `warm_start.steps = 100`',
    },
    "loss.advantages": {
        "grpo": '`loss.advantages = "group_normalised"`',
        "group_norm": '`loss.advantages = "group_normalised"`',
        "dr_grpo": '`loss.advantages = "group_mean"`',
        "grpo_passk": '`loss.advantages = "group_normalised"` over single completions',
        "rloo": '`loss.advantages = "leave_one_out"`',
        "remax": '`loss.advantages = "greedy_baseline"`',
        "reinforce": '`loss.advantages = "reward"`',
        "reinforce_plus_plus": '`loss.advantages = "reward"` with `loss.whiten_advantages = "batch"`',
        "reinforce_plus_plus_baseline": '`loss.advantages = "group_mean"` with `loss.whiten_advantages = "batch"`',
        "reinforce_baseline": '`loss.advantages = "group_mean"` with `loss.whiten_advantages = "batch"`',
        "vtrace": '`loss.advantages = "gae"` with `critic.vtrace = true`',
    },
    "loss.reduction": {
        "token-mean": '`loss.reduction = "token"`',
        "dapo": '`loss.reduction = "token"`',
        "bnpo": '`loss.reduction = "token"`',
        "seq-mean-token-mean": '`loss.reduction = "sequence"`',
        "grpo": '`loss.reduction = "sequence"`',
        "seq-mean-token-sum-norm": '`loss.reduction = "constant"`',
        "dr_grpo": '`loss.reduction = "constant"`',
    },
    "kl.estimator": {
        "kl": '`kl.estimator = "k1"`',
        "mse": '`kl.estimator = "k2"`',
        "low_var_kl": '`kl.estimator = "k3"`',
    },
    "generator.engine": {
        "sglang": 'engines are our own, or `generator.engine = "vllm"`',
        "hf": 'our own engine is `generator.engine = "native"`',
        "transformers": 'our own engine is `generator.engine = "native"`',
    },
    "trainer.optimizer.schedule": {
        "constant_with_warmup": '`trainer.optimizer.schedule = "constant"` with '
        "`trainer.optimizer.warmup_updates = 10`",
        "linear_with_warmup": '`trainer.optimizer.schedule = "linear"` with `trainer.optimizer.warmup_updates = 10`',
        "cosine_with_min_lr": '`trainer.optimizer.schedule = "cosine"` ends at 0',
    },
    "loss.several_rewards": {
        "sum_then_normalize": '`loss.several_rewards = "sum_then_normalise"`',
        "normalize_then_sum": '`loss.several_rewards = "normalise_then_sum"`',
    },
    "trackers.names": {
        "none": "without `trackers.names` there is none",
        "mlflow": 'there are `trackers.names = ["tensorboard", "wandb", "trackio"]`',
        "swanlab": 'there are `trackers.names = ["tensorboard", "wandb", "trackio"]`',
        "all": 'there are `trackers.names = ["tensorboard", "wandb", "trackio"]`',
    },
    "prompts.too_long": {
        "left": 'prompts lose their right end: `prompts.too_long = "cut"`',
        "right": '`prompts.too_long = "cut"`',
        "error": '`prompts.too_long = "drop"` counts them',
    },
    "trainer.precision": _PRECISIONS,
    "generator.precision": _PRECISIONS,
    "rewards.precision": _PRECISIONS,
    "kl.precision": _PRECISIONS,
}
"""By field, what others write for a value of ours."""


def counterparts(path: str) -> list[tuple[str, str, str]]:
    """Return (whose, name, entry) of every trainer that calls one of its fields `path`, one for each entry.

    The longest end of `path` counts that is a name, or the end of one: rollout.n is verl's actor_rollout_ref.rollout.n.
    """
    words = path.replace("-", "_").lower().split(".")
    for start in range(len(words)):
        end = ".".join(words[start:])
        is_own = "_" in end or "." in end  # a lone `name`, `n` or `path` could be anybody's
        found = {
            entry: (whose, name, entry)
            for whose, names in FIELDS.items()
            for name, entry in names.items()
            if name == end or (is_own and name.endswith(f".{end}"))
        }
        if found:
            return list(found.values())
    return []


def sentence(path: str, *, as_flags: bool = False) -> str | None:
    """Return "TRL's num_generations is `completions_per_group` here" for the field `path` of another trainer."""
    said = []
    for whose, name, entry in counterparts(path):
        field, _, more = entry.partition(", ")
        is_none = field == "-"
        said.append(
            f"{whose}'{'' if whose.endswith('s') else 's'} {name} "
            + ("has no counterpart here" if is_none else f"is `{field}` here")
            + (f"{':' if is_none else ','} {more}" if more else "")
        )
    return (flags_in("; ".join(said)) if as_flags else "; ".join(said)) or None


def sentences(paths: Iterable[str], *, as_flags: bool = False) -> str | None:
    """Return one `sentence` in full; of several fields what each is here, without what goes with it."""
    known = {path: found for path in dict.fromkeys(paths) if (found := counterparts(path))}
    if len(known) < 2:
        return next((sentence(path, as_flags=as_flags) for path in known), None)
    fields = {
        path: list(dict.fromkeys(entry.partition(", ")[0] for *_, entry in found)) for path, found in known.items()
    }
    said = [
        f"{path} is " + (" or ".join(f"`{field}`" for field in ours if field != "-") or "nothing") + " here"
        for path, ours in fields.items()
    ]
    told = "; ".join(said[:_MAX_TOLD]) + (f"; and {len(said) - _MAX_TOLD} more" if len(said) > _MAX_TOLD else "")
    return flags_in(told) if as_flags else told


_MAX_TOLD = 6
"""Fields in one hint: an error has one screen."""


def sentence_of_value(field: str, value: object, *, as_flags: bool = False) -> str | None:
    """Return what of ours stands for the `value` that other trainers have for `field`."""
    said = VALUES.get(field, {}).get(value.lower()) if isinstance(value, str) else None
    return flags_in(said) if said is not None and as_flags else said


def leaves(path: str, value: Any) -> Iterator[str]:
    """Yield the paths of the fields in `value`, which stands at `path`: of a table those of what is in it."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{path}.{name}", inner)
    else:
        yield path


def flags_in(text: str) -> str:
    """Return `text` with the fields and settings in its backticks as flags of the command line."""
    return re.sub(r"`([a-z_]+(?:\.[a-z_]+)*)(?: = ([^`]+))?`", _flag, text)


def _flag(found: re.Match[str]) -> str:
    name, value = found[1].replace("_", "-"), found[2]
    if value is None:
        return f"`--{name}`" if "_" in found[1] or "." in found[1] or found[1] in ("steps", "seed") else found[0]
    if value == "true":
        return f"`--{name}`"
    words = " ".join(re.findall(r"[^\s{}\[\],=\"]+", value))
    return f"`--{name} {words}`"
