"""The stages of a run besides RL, from checkpoint to checkpoint: sft, preferences, reward_model, evaluate."""
