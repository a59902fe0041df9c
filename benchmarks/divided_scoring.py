"""Bytes on each rank of a reference, and of a critic, that several ranks hold together, as planned and as measured.

    python benchmarks/divided_scoring.py [--layers 8] [--hidden 512]

A Llama with random weights in float32, on CPU ranks over gloo: whole on each rank, each layer shared by 2 ranks
(`kl.tensor_parallel`), cut over 2 ranks by FSDP2 (`kl.sharded`), and both on 2 x 2 ranks. Planned: what `slipstream
plan` counts as weights. Measured: the parameters that lie on a rank after it has read a batch, the least and the most
of all ranks. Beside it the largest difference of a logprob from those of one rank with the whole model.

Then a critic of the same shape (`critic.ranks`, `critic.tensor_parallel`), which is trained: weights, AdamW's moments
and gradients after an update, and the largest difference of a value, read again after it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import sys
import tempfile
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from slipstream.batching import collate
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.executor import Context
from slipstream.core.holders import HANDED
from slipstream.core.peer_messages import CriticUpdate, TargetNumbers, ValuesWanted
from slipstream.core.rank_group import RankGroup
from slipstream.core.sections import ModelConfig, TaskConfig
from slipstream.core.spans import NoSpans
from slipstream.core.types import Completion, Message, Prompt, Rollout, Segment, Stop, VersionSpan
from slipstream.models.config import TransformerConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import initialise
from slipstream.models.sharded import Division, build_frozen
from slipstream.models.shards import local_tensor
from slipstream.models.tokenizer import char_tokenizer
from slipstream.models.transformer import Transformer
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions
from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import DEVICES, GpuCluster
from slipstream.plan.layouts import ScorerLayout, TrainerLayout, Workload
from slipstream.plan.lengths import LengthSample
from slipstream.trainer.measure import Columns

VOCABULARY, PROMPT, COMPLETION, GROUPS, GROUP_SIZE = 4096, 24, 40, 4, 4
LAYOUTS = {
    "a whole copy each": ScorerLayout(devices=1, precision="float32"),
    "layers shared by 2": ScorerLayout(devices=2, tensor_parallel=2, precision="float32"),
    "cut over 2": ScorerLayout(devices=2, sharded=True, precision="float32"),
    "2 x 2": ScorerLayout(devices=4, tensor_parallel=2, sharded=True, precision="float32"),
}


def shape(layers: int, hidden: int) -> TransformerConfig:
    return TransformerConfig(
        family="llama",
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=hidden // 8,
        max_positions=128,
        tie_embeddings=False,
    )


def rollouts() -> list[Rollout]:
    rng = np.random.default_rng(0)
    made = []
    for ordinal in range(GROUPS):
        tokens = rng.integers(0, VOCABULARY, PROMPT).astype(np.int32)
        prompt = Prompt(prompt_id=str(ordinal), text="", tokens=tokens, task="")
        for sample in range(GROUP_SIZE):
            segment = Segment(
                tokens=rng.integers(0, VOCABULARY, COMPLETION).astype(np.int32),
                behaviour_logprobs=np.zeros(COMPLETION, np.float32),
                version_spans=(VersionSpan(start=0, version=0),),
            )
            completion = Completion(
                ordinal=ordinal, sample=sample, prompt=prompt, segments=(segment,), text="", finish_reason="length"
            )
            made.append(Rollout(completion=completion, reward=0.0))
    return made


def read(path: str, division: Division) -> tuple[int, np.ndarray]:
    """Bytes of parameters that lie here after a batch, and its logprobs."""
    from slipstream.trainer.reference_executor import reference_logprobs

    config = RunConfig(
        model=ModelConfig(path=path),
        prompts={"tasks": [TaskConfig(name="chain_sum")]},
        trainer={"microbatch_tokens": 256},
        kl={"coef": 0.1, "executor": "own"},
    )
    model = build_frozen(config.model, division, seed=0, tokenizer=char_tokenizer("abc"))
    found = reference_logprobs(model, rollouts(), config=config, batching=collate, ranks=division.data_parallel)
    held = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    return held, np.concatenate([one.reference_logprobs for one in found if one.reference_logprobs is not None])


class Queue:
    """Both ends of a channel of one process."""

    def __init__(self) -> None:
        self.messages = deque[Message]()

    def put(self, message: Message) -> None:
        self.messages.append(message)

    def get_nowait(self) -> Message | None:
        return self.messages.popleft() if self.messages else None

    def has_room_for(self, message: Message) -> bool:
        del message
        return True

    targets: frozenset[str] = frozenset()


def train(path: str, layout: ScorerLayout, group: RankGroup) -> tuple[int, np.ndarray]:
    """Bytes of weights, moments and gradients that lie here after an update of a critic, and values read after it."""
    from slipstream.trainer.batch import train_sequence
    from slipstream.trainer.critic_executor import CriticModel
    from slipstream.trainer.critic_link import ANSWERED, ASKED, by_key, sent_sequence

    config = RunConfig(
        model=ModelConfig(path=path),
        prompts={"tasks": [TaskConfig(name="chain_sum")]},
        trainer={"microbatch_tokens": 256},
        loss={"name": "ppo", "advantages": "gae"},
        critic={
            "executor": "own",
            "ranks": layout.devices,
            "tensor_parallel": layout.tensor_parallel,
            "head_init": "reward",
        },
    )
    sequences = [train_sequence(rollout.completion) for rollout in rollouts()]
    keys, counts = [one.key for one in sequences], [one.num_targets for one in sequences]
    numbers = np.random.default_rng(1).normal(size=sum(counts)).astype(np.float32)
    batch = [*map(sent_sequence, sequences), ValuesWanted(step=0, num_sequences=len(sequences))]
    returns = TargetNumbers(keys=np.array(keys, np.int64), counts=np.array(counts, np.int64), numbers=numbers)
    critic, ports = CriticModel(config=config, batching=collate), {name: Queue() for name in ("events", "commands")}
    asked, answered = Queue(), Queue()
    asked.messages.extend([*batch, returns, CriticUpdate(step=0, index=0), *batch, Stop()])
    critic.init(
        Context(
            name="critic",
            run_dir=Path(path),
            inputs={ASKED: asked, HANDED: asked, "commands": ports["commands"]},
            outputs={ANSWERED: answered, HANDED: Queue(), "events": ports["events"]},
            spans=NoSpans(),
            clock=WallClock(),
            group=group,
        )
    )
    while not critic.is_finished:
        critic.step()
    model, optimizer = critic.trained
    tensors = [local_tensor(one) for one in model.parameters()]
    tensors += [local_tensor(one.grad) for one in model.parameters() if one.grad is not None]
    tensors += [moment for by_name in optimizer.named_moments().values() for moment in by_name.values()]
    values: Columns = {}
    for message in answered.messages:
        values |= by_key(message) if isinstance(message, TargetNumbers) else {}
    critic.close()
    empty = np.zeros(0, np.float32)  # rank 0 answers for all
    return sum(tensor.nbytes for tensor in tensors), np.concatenate([values.get(key, empty) for key in keys])


def be_rank(rank: int, layout: ScorerLayout, path: str, store: str, what: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, layout.devices), rank=rank, world_size=layout.devices)
    assert dist.group.WORLD is not None
    group = RankGroup.over(dist.group.WORLD)
    data, tensor = group.split(layout.tensor_parallel)
    pipe.send(read(path, Division(data, tensor)) if what == "reference" else train(path, layout, group))


def measured(layout: ScorerLayout, path: str, store: str, what: str) -> list[tuple[int, np.ndarray]]:
    """What `read`, or `train`, gives on each of the layout's ranks."""
    if layout.devices == 1:
        return [read(path, Division()) if what == "reference" else train(path, layout, RankGroup.alone())]
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    for rank in range(layout.devices):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=be_rank, args=(rank, layout, path, store, what, theirs)))
        processes[-1].start()
        pipes.append(mine)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return found


def planned_bytes(costs: CostModel, config: TransformerConfig, layout: ScorerLayout, what: str) -> float:
    if what == "reference":
        return costs.scorer_memory(config, layout)["weights"]
    trained = TrainerLayout(
        devices=layout.devices, tensor_parallel=layout.tensor_parallel, microbatch=1, precision="float32"
    )
    held = costs.critic_memory(trained)
    return held["weights"] + held["moments"] + held["gradients"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = shape(options.layers, options.hidden)
    lengths = LengthSample(prompt_mean=PROMPT, completions=(COMPLETION,), source="benchmark")
    workload = Workload(groups=GROUPS, group_size=GROUP_SIZE, lengths=lengths, reference=True, critic=True)
    costs = CostModel(config, GpuCluster(device=DEVICES["H100"], num_devices=4), workload)
    print(f"command: {shlex.join(['python', *sys.argv])}")
    print(f"{describe()}, torch {torch.__version__}, commit {versions().commit}\n")
    with tempfile.TemporaryDirectory() as folder:
        model = Transformer(config)
        initialise(model, 0)
        save_model(model, Path(folder), char_tokenizer("abc"))
        del model
        for what, number in (("reference", "logprob"), ("critic", "value")):
            print(f"| {what} | ranks | planned, MB a rank | measured, MB | largest difference of a {number} |")
            print("|---|---|---|---|---|")
            whole: np.ndarray | None = None
            for index, (name, layout) in enumerate(LAYOUTS.items()):
                planned = planned_bytes(costs, config, layout, what)
                by_rank = measured(layout, folder, f"{folder}/store_{what}_{index}", what)
                sizes = sorted({f"{held / 1e6:.1f}" for held, _ in by_rank}, key=float)
                whole = by_rank[0][1] if whole is None else whole
                apart = max(float(np.abs(read - whole).max()) for _, read in by_rank if len(read))
                name = name.replace("a whole copy each", "whole") if what == "critic" else name
                print(f"| {name} | {layout.devices} | {planned / 1e6:.1f} | {' to '.join(sizes)} | {apart:.1e} |")
            print()


if __name__ == "__main__":
    main()
