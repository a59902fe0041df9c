"""vLLM as the generator's engine: `worker.py` runs in vLLM's environment, the rest in Slipstream's."""
