"""Contender: `model.generate` of transformers, one padded batch after the other. Run by `engine.py`.

A batch takes the next `batch` requests of the queue and runs until its longest is done: `generate` cannot let another
request into a row that has ended. All prompts have one length, so none is padded. Cache: see `CACHE`.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from contenders.protocol import Job, Run, Workload, serve, timed
from transformers import AutoModelForCausalLM, GenerationConfig

CACHE = "dynamic"


def start(job: Job) -> tuple[object, dict[str, str]]:
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    sampling = (
        {} if job.is_greedy else {"do_sample": True, "top_k": 0, "output_logits": True, "return_dict_in_generate": True}
    )
    # The model's own defaults fill what a call leaves out, its end token among it.
    model.generation_config = GenerationConfig(pad_token_id=0, cache_implementation=CACHE, **sampling)

    @torch.inference_mode()
    def generate(workload: Workload) -> list[int]:
        lengths = []
        for first in range(0, len(workload.prompts), job.batch):
            prompts = torch.tensor(workload.prompts[first : first + job.batch])
            wanted = workload.lengths[first : first + job.batch]
            longest = max(wanted)
            out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=longest)
            if not job.is_greedy:
                for step, logits in enumerate(out.logits):
                    tokens = out.sequences[:, prompts.shape[1] + step, None]
                    logits.log_softmax(-1).gather(1, tokens)
                out = out.sequences
            made = out.shape[1] - prompts.shape[1]
            lengths += [min(length, made) for length in wanted]
        return lengths

    def run(workload: Workload) -> Run:
        return timed(generate, workload)

    return run, {
        "transformers": version("transformers"),
        "torch": version("torch"),
        "cache": CACHE,
        "attention": "sdpa",
    }


if __name__ == "__main__":
    serve(start)
