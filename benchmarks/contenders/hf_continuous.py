"""Contender: continuous batching of transformers (`ContinuousBatchingManager`). Run by `engine.py`.

The manager behind `generate_batch`, used directly because that takes one `max_new_tokens` for all requests.
"""

from __future__ import annotations

import math
from importlib.metadata import version

import torch
from contenders.protocol import Job, Run, Workload, serve, timed
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE = 32  # tokens; without flash attention every step works through all pages of all sequences, so small ones pay


def start(job: Job) -> tuple[object, dict[str, str]]:
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    sampling = {"do_sample": False} if job.is_greedy else {"do_sample": True, "top_k": 0}
    pages = math.ceil(job.max_len / PAGE)
    settings = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=(job.batch + 1) * (pages + 1),
        max_batch_tokens=max(512, job.batch),  # the attention mask is dense over them: more is slower
        max_requests_per_batch=job.batch,
        allow_block_sharing=False,
        use_async_batching=False,
        return_logprobs=not job.is_greedy,
    )
    manager = model.init_continuous_batching(GenerationConfig(eos_token_id=-1, pad_token_id=0, **sampling), settings)
    manager.start()

    def generate(workload: Workload) -> list[int]:
        names = [
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            for prompt, length in zip(workload.prompts, workload.lengths, strict=True)
        ]
        lengths: dict[str, int] = {}
        while len(lengths) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                lengths[result.request_id] = len(result.generated_tokens)
                if not job.is_greedy and len(result.logprobs) != len(result.generated_tokens):
                    raise RuntimeError("there are tokens without a logprob")
            elif result is None and not manager.is_running():
                raise RuntimeError("the manager's thread has ended")
        return [lengths[name] for name in names]

    def run(workload: Workload) -> Run:
        return timed(generate, workload)

    facts = {"transformers": version("transformers"), "torch": version("torch"), "attention": "sdpa", "page": str(PAGE)}
    return run, facts


if __name__ == "__main__":
    serve(start)
