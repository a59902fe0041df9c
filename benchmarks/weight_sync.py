"""How long a version takes from the trainer's weights to a generator's, on one machine.

    python benchmarks/weight_sync.py [--repeats 15] [--params 1000000 4000000 135000000] [--only whole,pairs]
    python benchmarks/weight_sync.py --device cuda

With `--device cuda` both ends are on GPUs: the first has the trainer, the last the generator. Then
whole is over CUDA IPC, and pairs is one rank to another over IPC and, between two GPUs, over NCCL; their bound is
torch's copy from one GPU to the other.

whole: one rank to one process. stage: the trainer's copy into the slot, with checksum; the trainer is blocked as long.
transfer: slot to shadow buffer, with checksum, beside decoding. pause: pointer flip and probe (an empty one here).
total: from the call of `publish` to the news that the version is live. memcpy is the bound: numpy copying between two
warm buffers of that size in the publisher's process, one thread, as staging does.

pairs: a trainer of several ranks, each a process, to generators divided otherwise, whose ranks are threads of this
process. Bytes: what all generator ranks receive; seconds: until the last has it. Share: of one thread copying those
bytes, or of one gloo pair sending them in buckets.

plans: seconds to plan a link of many ranks, from the boxes of a 405B model.

model: what bandwidth allows at best, T >= max(B / (tp * bw), R * B / (S * bw)), beside what others have measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from link_price import price
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slipstream.core.channel import Ports, connect, make_transport_dir, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.peer_messages import Holding
from slipstream.core.rank_group import RankGroup
from slipstream.core.scratch import cleanup
from slipstream.core.service_messages import Export, Published
from slipstream.core.types import Stop, Swapped
from slipstream.models.config import TransformerConfig
from slipstream.models.quantized import Packer, WeightLayout
from slipstream.models.shards import local_tensor
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer
from slipstream.weight_sync.copying import HOST, Memory
from slipstream.weight_sync.cuda_ipc import CudaIpc
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.resharding import make_plan
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Transport
from slipstream.weight_sync.subscriber import Subscriber
from slipstream.weight_sync.weight_links import Links

TOKENS = np.arange(4, dtype=np.int32)
DEADLINE_S = 300.0  # for a process to start and to answer, on a busy machine too
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["torch.distributed.fsdp", "slipstream.weight_sync.publisher"])
SPECS = [
    ChannelSpec("offers", Kind.WEIGHTS, "trainer.offers", "generator.offers"),
    ChannelSpec("releases", Kind.GATHER, "generator.releases", "trainer.releases"),
    ChannelSpec("commands", Kind.BROADCAST, "trainer.commands", "generator.commands"),
    ChannelSpec("events", Kind.GATHER, "generator.events", "trainer.events"),
]


def gpu_of(end: str) -> torch.device:
    """The trainer's, or the generator's."""
    return torch.device("cuda", 0 if end == "trainer" else torch.cuda.device_count() - 1)


def memory_of(end: str, is_on_gpu: bool) -> Memory:
    return DeviceMemory(gpu_of(end)) if is_on_gpu else HOST


def transport_of(end: str, run_id: str, is_on_gpu: bool) -> Transport:
    memory = memory_of(end, is_on_gpu)
    return CudaIpc(run_id, memory) if isinstance(memory, DeviceMemory) else SharedMemory(run_id)


def copying_s(source: torch.Tensor, is_on_gpu: bool, repeats: int) -> list[float]:
    """Seconds of single copies: by numpy, between its own buffers, in one thread; or to the generator's GPU."""
    target = torch.from_numpy(np.zeros(source.nbytes, np.uint8)).to(memory_of("generator", is_on_gpu).device)
    source, taken = source.view(torch.uint8), []
    for _ in range(repeats):
        started_s = time.perf_counter()
        if source.is_cuda:
            target.copy_(source)
            torch.cuda.synchronize(target.device)
        else:
            np.copyto(target.numpy(), source.numpy())
        taken.append(time.perf_counter() - started_s)
    return taken


class Parameters:
    reads_flat = True

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.holding: Holding | None = None

    def prepare(self, flat: torch.Tensor) -> None: ...

    def rebind(self, flat: torch.Tensor) -> None:
        self.flat = flat


def generate(directory: Path, run_id: str, num_params: int, device: str) -> None:
    """The subscriber's process: commit whatever comes and report it, until told to stop."""
    ports = connect(SPECS, "generator", directory, 1)
    transport = transport_of("generator", run_id, device == "cuda")
    subscriber = Subscriber(ports.inputs["offers"], ports.outputs["releases"], transport, replica=0)
    parameters = Parameters(torch.zeros(num_params, device=transport.memory.device))
    subscriber.open(parameters, lambda tokens: parameters.flat[: len(tokens) - 1].cpu().numpy(), 1e-3, is_threaded=True)
    while ports.inputs["commands"].get_nowait() != Stop():
        if not subscriber.poll():
            wait(ports.inputs.values(), ports.outputs.values(), subscriber.wait_fds())
        if (swap := subscriber.commit()) is not None:
            ports.outputs["events"].put(
                Swapped(
                    replica=0,
                    version=swap.version,
                    transfer_s=swap.transfer_s,
                    pause_s=swap.pause_s,
                    probe_error=swap.probe_error,
                )
            )
    subscriber.close()
    ports.close()


def measure(num_params: int, repeats: int, device: str) -> None:
    run_id, directory = f"bench-{os.getpid()}", make_transport_dir()
    ports = connect(SPECS, "trainer", directory, 1)
    child = subprocess.Popen([sys.executable, __file__, "--generate", str(directory), run_id, str(num_params), device])
    gone = os.pidfd_open(child.pid)  # readable when it has ended
    transport = transport_of("trainer", run_id, device == "cuda")
    publisher = Publisher(ports.outputs["offers"], ports.inputs["releases"], transport, num_readers=1, num_slots=2)
    live = torch.rand(num_params, device=transport.memory.device)
    stage_s, transfer_s, pause_s, total_s, copy_s = [], [], [], [], []
    try:
        publisher.open(live)
        for version in range(repeats + 2):  # the first touch of each of the two slots and buffers is not counted
            started_s = time.perf_counter()
            published = publisher.publish(version, TOKENS, live[:3].cpu().numpy().copy())
            assert published, "the reader had released its slots"
            while not isinstance(event := ports.inputs["events"].get_nowait(), Swapped):
                is_told = wait([ports.inputs["events"]], ports.outputs.values(), [gone], timeout_s=DEADLINE_S)
                if child.poll() is not None:
                    raise SystemExit("the generator process has ended: its error is above")
                if not is_told:
                    raise SystemExit(f"the generator process did not answer within {DEADLINE_S:.0f} s")
            ended_s = time.perf_counter()
            publisher.poll()
            if version >= 2:
                total_s.append(ended_s - started_s)
                stage_s.append(publisher.stats.staging_s)
                transfer_s.append(event.transfer_s)
                pause_s.append(event.pause_s)
        copy_s += copying_s(live, device == "cuda", repeats)
        ports.outputs["commands"].put(Stop())
        child.wait(DEADLINE_S)
    finally:
        child.kill()
        child.wait()
        os.close(gone)
        publisher.close()
        ports.close()
        shutil.rmtree(directory)
        cleanup(run_id)

    num_bytes = 4 * num_params
    cells = [f"{num_params / 1e6:7.0f} M {num_bytes / 1e6:8.1f} MB"]
    for name, times in (("stage", stage_s), ("transfer", transfer_s), ("memcpy", copy_s)):
        median = statistics.median(times)
        cells.append(f"{name} {median * 1e3:8.2f} ms ({num_bytes / median / 1e9:5.2f} GB/s)")
    total, copy = statistics.median(total_s), statistics.median(copy_s)
    cells.append(f"total {total * 1e3:8.2f} ms ({total / copy:4.2f} copies)")
    cells.append(f"pause {statistics.median(pause_s) * 1e6:6.0f} us (max {max(pause_s) * 1e6:.0f})")
    print("  ".join(cells), flush=True)


# Pairs of layouts


@dataclass(frozen=True)
class Pair:
    """data_parallel x tensor_parallel ranks of a trainer, and the ranks of each generator replica."""

    data_parallel: int
    tensor_parallel: int
    replicas: tuple[int, ...]
    way: str
    precision: str
    config: TransformerConfig
    folder: str
    run_id: str

    @property
    def world(self) -> int:
        return self.data_parallel * self.tensor_parallel

    @property
    def readers(self) -> list[tuple[int, int]]:
        return [(replica, rank) for replica, world in enumerate(self.replicas) for rank in range(world)]

    @property
    def channels(self) -> list[ChannelSpec]:
        specs = [ChannelSpec("events", Kind.GATHER, "trainer.events", "bench.events")]
        for replica, rank in self.readers:
            name = f"generator-{replica}@{rank}"
            specs.append(ChannelSpec(f"offers/{name}", Kind.WEIGHTS, "trainer.offers", f"{name}.offers"))
            specs.append(ChannelSpec(f"releases/{name}", Kind.GATHER, f"{name}.releases", "trainer.releases"))
        for rank in range(self.world):
            name = "trainer" if rank == 0 else f"trainer@{rank}"
            specs.append(ChannelSpec(f"commands/{rank}", Kind.BROADCAST, "bench.commands", f"{name}.commands"))
            if rank:
                specs.append(ChannelSpec(f"relay/{rank}", Kind.BROADCAST, "trainer.relay", f"{name}.relayed"))
        return specs

    @property
    def is_on_gpu(self) -> bool:
        return self.way in ("ipc", "nccl")

    def links(self, end: str) -> Links | None:
        if self.way not in ("gloo", "nccl"):
            return None
        return Links(dist.FileStore(f"{self.folder}/links", -1), memory=memory_of(end, self.is_on_gpu))


def pause(everyone: list[Ports], fds: Sequence[int] = ()) -> None:
    """Until something arrives; now and then the links are looked after, as a host does."""
    inputs = [port for ports in everyone for port in ports.inputs.values()]
    outputs = [port for ports in everyone for port in ports.outputs.values()]
    wait(inputs, outputs, fds, timeout_s=0.5)
    for port in outputs:
        port.pump()


def train_rank(rank: int, pair: Pair) -> None:
    """A trainer's rank: publishes what it is told to."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{pair.folder}/ranks", pair.world), rank=rank, world_size=pair.world
    )
    mesh = init_device_mesh("cpu", (pair.data_parallel, pair.tensor_parallel), mesh_dim_names=("data", "tensor"))
    over_ranks = None
    model = Transformer(pair.config)
    if pair.tensor_parallel > 1:
        group = mesh["tensor"].get_group()
        model, over_ranks = TensorParallel.over(group, pair.config).new_model(), RankGroup.over(group).max
    if pair.data_parallel > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    if pair.is_on_gpu:
        torch.cuda.set_device(gpu_of("trainer"))
        model.to(gpu_of("trainer"))
    weights = {name: local_tensor(parameter.detach()) for name, parameter in model.named_parameters()}
    for weight in weights.values():
        weight.normal_()
    ports = connect(pair.channels, "trainer" if rank == 0 else f"trainer@{rank}", Path(pair.folder), 1)
    publisher = Publisher(
        ports.outputs["offers"] if rank == 0 else None,
        ports.inputs["releases"] if rank == 0 else None,
        transport_of("trainer", pair.run_id, pair.is_on_gpu),
        num_readers=len(pair.replicas),
        reader_ranks=max(pair.replicas),
        group=RankGroup.over(dist.group.WORLD),
        links=pair.links("trainer"),
        relay=ports.outputs["relay"] if rank == 0 and pair.world > 1 else None,
    )
    publisher.open(None, Packer(WeightLayout(model, pair.precision), weights, over_ranks=over_ranks))
    version = 0
    while True:
        publisher.poll()
        if pair.world > 1 and rank and (message := ports.inputs["relayed"].get_nowait()) is not None:
            publisher.take(message)
        message = ports.inputs["commands"].get_nowait()
        if isinstance(message, Stop):
            break
        if message is None:
            pause([ports])
            continue
        publisher.publish(version, TOKENS, np.zeros(3, np.float32))
        if rank == 0:
            ports.outputs["events"].put(
                Published(version=version, payload_bytes=publisher.num_bytes, staging_s=publisher.stats.staging_s)
            )
        version += 1
    publisher.close()
    ports.close()
    dist.destroy_process_group()


def measure_pair(pair: Pair, repeats: int, gloo_bytes_per_s: float) -> None:
    processes = [CHILDREN.Process(target=train_rank, args=(rank, pair), daemon=True) for rank in range(pair.world)]
    for process in processes:
        process.start()
    bench = connect(pair.channels, "bench", Path(pair.folder), 1)
    ends = []
    for replica, rank in pair.readers:
        world = pair.replicas[replica]
        model = TensorParallel(pair.config, rank, world).new_model() if world > 1 else Transformer(pair.config)
        layout = WeightLayout(model, pair.precision)
        ports = connect(pair.channels, f"generator-{replica}@{rank}", Path(pair.folder), 1)
        memory = memory_of("generator", pair.is_on_gpu)
        parameters = Parameters(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=memory.device))
        parameters.holding = layout.holding
        end = Subscriber(
            ports.inputs["offers"],
            ports.outputs["releases"],
            transport_of("generator", pair.run_id, pair.is_on_gpu),
            replica=replica,
            rank=rank,
            world=world,
            links=pair.links("generator"),
        )
        end.open(parameters, lambda tokens: np.zeros(3, np.float32), 1e-3, is_threaded=True)
        ends.append((ports, end, parameters))
    seconds, staging_s = [], []
    everyone = [bench, *(ports for ports, _, _ in ends)]
    fds = [fd for _, end, _ in ends for fd in end.wait_fds()]
    for version in range(repeats + 2):
        bench.outputs["commands"].put(Export(path=""))
        waiting, swaps = set(range(len(ends))), []
        while waiting:
            if not sum(end.poll() for _, end, _ in ends):
                pause(everyone, fds)
            for n in list(waiting):
                if ends[n][1].pending_version == version:
                    swaps.append(ends[n][1].commit())
                    waiting.remove(n)
            if isinstance(event := bench.inputs["events"].get_nowait(), Published):
                staged_s = event.staging_s
        if version >= 2:
            seconds.append(max(swap.transfer_s for swap in swaps))
            staging_s.append(staged_s)
    num_bytes = sum(parameters.flat.nbytes for _, _, parameters in ends)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=memory_of("trainer", pair.is_on_gpu).device)
    bound_s = num_bytes / gloo_bytes_per_s if pair.way == "gloo" else min(copying_s(source, pair.is_on_gpu, 3))
    median = statistics.median(seconds)
    trainer = f"fsdp{pair.data_parallel} x tp{pair.tensor_parallel}"
    generators = " + ".join(f"tp{world}" for world in pair.replicas)
    print(
        f"{trainer:12} -> {generators:9} {pair.way:6} {pair.precision:8} {num_bytes / 1e6:7.1f} MB "
        f"stage {statistics.median(staging_s) * 1e3:7.1f} ms  transfer {median * 1e3:7.1f} ms "
        f"{num_bytes / median / 1e9:5.2f} GB/s  {100 * bound_s / median:4.0f}% of {pair.way}'s bound",
        flush=True,
    )
    bench.outputs["commands"].put(Stop())
    for process in processes:
        process.join(DEADLINE_S)
    for ports, end, _ in ends:
        end.close()
        ports.close()
    bench.close()


def raw_gloo(num_bytes: int = 64 << 20, repeats: int = 10) -> float:
    """Bytes per second of one pair of processes, bucket after bucket."""
    folder = make_transport_dir()
    other = CHILDREN.Process(target=gloo_end, args=(1, str(folder / "raw"), num_bytes, repeats), daemon=True)
    other.start()
    rate = gloo_end(0, str(folder / "raw"), num_bytes, repeats)
    other.join()
    shutil.rmtree(folder)
    return rate


def gloo_end(rank: int, path: str, num_bytes: int, repeats: int) -> float:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=DEADLINE_S)
    pg = dist.ProcessGroupGloo(dist.FileStore(path, -1), rank, 2, options)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    taken = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        (pg.send([buffer], 1, 0) if rank == 0 else pg.recv([buffer], 0, 0)).wait()
        (pg.recv([buffer[:8]], 1, 1) if rank == 0 else pg.send([buffer[:8]], 0, 1)).wait()
        taken.append(time.perf_counter() - started_s)
    return num_bytes / statistics.median(taken)


def measure_pairs(repeats: int, device: str) -> None:
    config = TransformerConfig(
        family="llama",
        vocab_size=16000,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=12,
        num_heads=8,
        num_kv_heads=4,
        head_dim=72,
        max_positions=64,
        tie_embeddings=True,
    )
    if device == "cuda":
        rate, layouts, low = 0.0, [(1, 1, (1,))], "bfloat16"
        ways: tuple[str, ...] = ("ipc", "nccl") if torch.cuda.device_count() > 1 else ("ipc",)
    else:
        rate, ways, low = raw_gloo(), ("memory", "gloo"), "int8"
        print(f"raw gloo, one pair: {rate / 1e9:.2f} GB/s")
        layouts = [(1, 1, (1,)), (2, 1, (1,)), (2, 1, (2,)), (2, 1, (1, 1)), (2, 2, (1,))]
    for data_parallel, tensor_parallel, replicas in layouts:
        for way in ways:
            has_both = data_parallel * tensor_parallel == 2 or device == "cuda"
            for precision in ("float32", low) if has_both else ("float32",):
                folder, run_id = make_transport_dir(), f"bench-{os.getpid()}"
                pair = Pair(data_parallel, tensor_parallel, replicas, way, precision, config, str(folder), run_id)
                try:
                    measure_pair(pair, repeats, rate)
                finally:
                    shutil.rmtree(folder)
                    cleanup(run_id)


# Plans and the model of section 4.1

LLAMA_405B = TransformerConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=16384,
    intermediate_size=53248,
    num_layers=126,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    max_positions=8,
    tie_embeddings=False,
)


def holdings_of(config: TransformerConfig, shards: int, tensor_parallel: int) -> list[Holding]:
    """Of all ranks, without making any: the rows of each tensor-parallel rank's parameters in equal parts."""
    found = []
    for rank in range(tensor_parallel):
        with torch.device("meta"):
            model = TensorParallel(config, rank, tensor_parallel).new_model()
        whole = WeightLayout(model, "bfloat16").holding
        rows = whole.stop[:, 0] - whole.start[:, 0]
        for shard in range(shards):
            first, last = rows * shard // shards, rows * (shard + 1) // shards
            keep = last > first
            start, stop = whole.start[keep].copy(), whole.stop[keep].copy()
            start[:, 0], stop[:, 0] = (whole.start[:, 0] + first)[keep], (whole.start[:, 0] + last)[keep]
            sizes = (stop - start).prod(1) * 2
            offset = np.cumsum(sizes) - sizes
            strides = np.stack([2 * (stop - start)[:, 1], np.full(len(start), 2)], 1)
            found.append(
                Holding(
                    num_bytes=int(sizes.sum()),
                    names=whole.names,
                    shapes=whole.shapes,
                    types=("bfloat16",) * len(whole.names),
                    item_bytes=(2,) * len(whole.names),
                    tensor=whole.tensor[keep],
                    start=start,
                    stop=stop,
                    offset=offset,
                    strides=strides,
                )
            )
    return found


def measure_plans() -> None:
    for shards, tensor_parallel, generator in ((8, 8, 8), (32, 8, 8), (64, 8, 16)):
        sources, destinations = holdings_of(LLAMA_405B, shards, tensor_parallel), holdings_of(LLAMA_405B, 1, generator)
        started_s = time.perf_counter()
        plan = make_plan(sources, destinations)
        plan_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        assert plan.hash
        hash_s = time.perf_counter() - started_s
        rates = {"sender_bytes_per_s": 50e9, "receiver_bytes_per_s": 50e9}
        bound = price(plan.bytes_sent(), **rates)
        print(
            f"405B bf16, fsdp{shards} x tp{tensor_parallel} -> tp{generator:<2}  "
            f"{sum(len(h.tensor) for h in sources):7} boxes, {sum(len(c) for c in plan.copies.values()):7} copies  "
            f"plan {plan_s:5.2f} s  hash {hash_s:5.2f} s  at 50 GB/s: pairs {bound.pairs_s:5.2f} s, "
            f"broadcast {bound.broadcast_s:5.2f} s",
            flush=True,
        )


MEASURED = {
    "7B": "LlamaRL 0.04 s, OpenRLHF 4.32 s",
    "70B": "LlamaRL 1.15 s, OpenRLHF 111.65 s",
    "405B": "LlamaRL 2.31 s",
}
"""As LlamaRL's authors measured both (arXiv:2505.24034)."""


def print_model() -> None:
    print("T >= max(B / (tp * bw), R * B / (S * bw)), bw = 50 GB/s; one replica from S = 64 senders, and rank 0 alone")
    for name, params in (("7B", 7.6e9), ("70B", 70.6e9), ("405B", 406e9)):
        for kind, width in (("bf16", 2), ("fp8", 1)):
            cells = [
                f"tp{tp}: {1e3 * max(params * width / (tp * 50e9), params * width / (64 * 50e9)):7.0f} ms"
                for tp in (1, 8, 16)
            ]
            print(f"{name:5} {kind:5} rank 0: {1e3 * params * width / 50e9:6.0f} ms  ", "  ".join(cells))
        print("      measured by others:", MEASURED[name])


def main() -> None:
    if sys.argv[1:2] == ["--generate"]:
        generate(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--params", type=int, nargs="+", default=[1_000_000, 4_000_000, 135_000_000])
    parser.add_argument("--only", default="whole,pairs,plans,model", help="parts, with commas between")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"there is no GPU here that torch {torch.__version__} can use: nothing was measured")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print("command ", "python benchmarks/weight_sync.py", *sys.argv[1:])
    print("commit  ", commit.strip() or "unknown")
    print("hardware", platform.machine(), f"{os.cpu_count()} cores", f"load {os.getloadavg()[0]:.1f}")
    print("versions", "python", platform.python_version(), "torch", torch.__version__, "numpy", np.__version__)
    if arguments.device == "cuda":
        print("GPUs    ", ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())))
    print("medians of", arguments.repeats)
    if "whole" in parts:
        for num_params in arguments.params:
            measure(num_params, arguments.repeats, arguments.device)
    if "pairs" in parts:
        measure_pairs(arguments.repeats, arguments.device)
    if "plans" in parts:
        measure_plans()
    if "model" in parts:
        print_model()


if __name__ == "__main__":
    main()
