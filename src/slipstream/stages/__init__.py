"""The stages of a run, from checkpoint to checkpoint: sft, preferences, dpo, reward_model, rl, evaluate."""
