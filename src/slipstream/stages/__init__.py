"""What a run may go through besides RL, from checkpoint to checkpoint: sft, preferences, reward_model, evaluate."""
