"""Job files: run in a shell whose `sbatch`, `kubectl`, `sky` and others are stand-ins that note what they are asked.

Command lines are read by the command's own parser. What the scripts do under a real SLURM is told in docs/cluster.md.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from covering import with_slow
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from slipstream import cli
from slipstream.controller.build import nodes
from slipstream.controller.meeting import ALWAYS_REMOTE
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.keys import RunKeys
from slipstream.core.recipes import resolve
from slipstream.flags import parse
from slipstream.jobs.kubernetes import kubernetes_files
from slipstream.jobs.machines import (
    CONTROLLER_RESTARTS,
    CPUS_PER_RANK,
    GROUP_RESTARTS,
    JOB_JOIN_TIMEOUT_S,
    Machines,
    lay_out,
    machines,
)
from slipstream.jobs.skypilot import skypilot_files
from slipstream.jobs.slurm import slurm_files

GPUS: dict[str, Any] = {
    "trainer": {"ranks": 16, "tensor_parallel": 4, "device": "cuda"},
    "generator": {"replicas": 3, "tensor_parallel": 2, "device": "cuda"},
}
SCORING: dict[str, Any] = GPUS | {
    "rewards": {"models": [{"path": "scorer"}], "model_ranks": 12, "device": "cuda"},
    "kl": {"coef": 0.1, "executor": "own", "ranks": 2, "device": "cuda"},
}
"""The reward models fill two machines of eight GPUs, the reference a part of one."""
KINDS = ("slurm", "kubernetes", "skypilot")
WIDE: dict[str, Any] = {"generator": {"replicas": 2, "tensor_parallel": 4}}

# A stand-in notes its call (program, arguments, some of its environment) and then does what its lines say. Each imports
# as little as it can: a test starts many.
STAND_IN = """#!{python} -IS
import os, sys
name, args, env = os.path.basename(sys.argv[0]), sys.argv[1:], os.environ
noted = os.path.join(os.path.dirname(os.path.dirname(sys.argv[0])), "calls")
with open(noted, "a") as calls:
    seen = {{key: value for key, value in env.items() if key.startswith(("SLURM", "SLIPSTREAM"))}}
    stdin = sys.stdin.read() if "/dev/stdin" in " ".join(args) else ""
    calls.write(ascii([name, args, seen, os.getcwd(), stdin]) + "\\n")
def counted():
    with open(noted) as calls:
        return sum(line.startswith("[" + ascii(name) + ",") for line in calls)
{body}
"""
BODIES = {
    "sbatch": "sys.exit(1) if args[-1] == env.get('REFUSED') else print(f'{100 + counted()};cluster')",
    "srun": (
        "command = [arg for i, arg in enumerate(args) if not all(a.startswith('--') for a in args[:i + 1])]\n"
        "nodes = int(env['SLURM_JOB_NUM_NODES'])\n"
        "of = [{**env, 'SLURM_NODEID': str(n)} for n in range(nodes)]\n"
        "codes = [os.spawnvpe(os.P_WAIT, command[0], command, each) for each in of]\n"
        "sys.exit(max(codes))"
    ),
    "slipstream": (
        "if '--address-file' in args: open(args[args.index('--address-file') + 1], 'w').write('10.0.0.1:5')\n"
        "sys.exit(int(env.get('EXIT', 0)))"
    ),
    "squeue": "print(env.get('QUEUED', ''))",
    "hostname": "print('10.1.2.3 192.168.0.9 fe80::1 ')",
    "kubectl": (
        "if 'get' in args and 'jobs' in args: print(env.get('ACTIVE', ''), end='')\n"
        "sys.exit('get' in args and args[args.index('get') + 1] in env.get('MISSING', '').split())"
    ),
    "sky": "print(f'1  {env.get(\"ACTIVE\")}  RUNNING' if 'queue' in args else '')",
    "scontrol": "",
    "scancel": "",
}


class Cluster:
    """A folder with job files and a shell in which the cluster's programs are stand-ins."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin, self.folder, self.work = root, root / "bin", root / "job's files", root / "my work"
        for folder in (self.bin, self.folder, self.work):
            folder.mkdir()
        for name, body in BODIES.items():
            (self.bin / name).write_text(STAND_IN.format(python=sys.executable, body=body))
            (self.bin / name).chmod(0o755)

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def slurm(self, overrides: dict[str, Any], **options: Any) -> None:
        self.write(slurm_files(config(overrides), self.folder, working_dir=self.work, **options))

    def run(self, script: str, *args: str, **variables: str) -> int:
        variables = {"PATH": f"{self.bin}:{os.environ['PATH']}", **variables}
        return subprocess.run(["bash", script, *args], cwd=self.root, env=variables, timeout=60).returncode

    def job(self, name: str, *args: str, **variables: str) -> int:
        """Run a batch script with the environment that SLURM gives it for its #SBATCH lines."""
        asked = sbatch_options((self.folder / name).read_text())
        given = {"JOB_ID": "1234567", "JOB_NUM_NODES": asked["nodes"], "CPUS_PER_TASK": asked["cpus-per-task"]}
        environment = {f"SLURM_{key}": value for key, value in given.items()} | {"SLURMD_NODENAME": "node-a"}
        return self.run(str(self.folder / name), *args, **environment, **variables)

    def calls(self, program: str) -> list[list[Any]]:
        """[arguments, environment, working folder, standard input] of all calls of `program` so far."""
        lines = (self.root / "calls").read_text().splitlines()
        return [call for name, *call in map(ast.literal_eval, lines) if name == program]

    def arguments(self, program: str) -> list[list[str]]:
        return [call[0] for call in self.calls(program)]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@cache
def _config(overrides: str) -> RunConfig:
    return resolve("quickstart", json.loads(overrides))


def config(overrides: dict[str, Any] | None = None) -> RunConfig:
    return _config(json.dumps(overrides))


def parsed(arguments: list[str]) -> Any:
    """What `slipstream launch` understands; the test fails where it does not."""
    assert arguments[0] == "launch"
    return parse(cli.LaunchOptions, arguments[1:], cli.launch_command)


def sbatch_options(script: str) -> dict[str, str]:
    """Those of the #SBATCH lines, which SLURM reads up to the first line that is no comment."""
    head = script.split("\n")
    head = head[: next(i for i, line in enumerate(head) if line and not line.startswith("#"))]
    options = [line.removeprefix("#SBATCH --") for line in head if line.startswith("#SBATCH ")]
    assert len(options) == script.count("\n#SBATCH "), "an option below the first command means nothing"
    return {name: value for name, _, value in (option.partition("=") for option in options)}


def documents(text: str) -> Any:
    """Read YAML with the library in C, ten times as fast."""
    return yaml.load_all(text, Loader=yaml.CSafeLoader)


def manifests(files: dict[str, str]) -> dict[tuple[str, str], Any]:
    """All objects by (kind, name)."""
    found = [each for name, text in files.items() if name.endswith(".yaml") for each in documents(text)]
    assert len({(each["kind"], each["metadata"]["name"]) for each in found}) == len(found)
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


def run_files(kind: str, overrides: dict[str, Any], **options: Any) -> dict[str, str]:
    if kind == "slurm":
        return slurm_files(config(overrides), Path("/shared/a b"), working_dir=Path("/home/me"), **options)
    if kind == "skypilot":
        return skypilot_files(config(overrides), "run-a", image="r/s:1", accelerator="H100", **options)
    return kubernetes_files(config(overrides), "run-a", image="registry/slipstream:1", namespace="team", **options)


def tasks(files: dict[str, str]) -> dict[str, Any]:
    """Return the tasks of a job group by name."""
    _, *found = documents(files["run.yaml"])
    return {task["name"]: task for task in found}


def controller_remote(kind: str, files: dict[str, str]) -> frozenset[str]:
    """What the controller's command is told to leave to others, beside trainer and generators."""
    [command] = [files[name] for name in ("controller.sbatch", "controller.yaml", "run.yaml") if name in files]
    [names] = re.findall(r"--group controller(?: --remote((?: \w+)+))? --listen", command)
    return frozenset(names.split())


def placed(kind: str, files: dict[str, str]) -> list[tuple[str, int]]:
    """(group, rank) of every process that the jobs of groups start, on all their machines."""
    found = []
    if kind == "slurm":
        for name, text in files.items():
            if name.endswith(".sbatch") and name not in ("controller.sbatch", "end.sbatch"):
                asked, group = sbatch_options(text), name.removesuffix(".sbatch")
                [ranks] = re.findall(r"SLURM_CPUS_PER_TASK / (\d+)\)", text)
                replicas = asked.get("array", "").removeprefix("0-")
                groups = [group] if not replicas else [f"{group}-{n}" for n in range(int(replicas) + 1)]
                found += [(each, rank) for each in groups for rank in range(int(asked["nodes"]) * int(ranks))]
        return found
    if kind == "skypilot":
        for task in tasks(files).values():
            if task["name"] != "controller":
                [(group, threads)] = re.findall(r"--group (\S+) .* --threads (\d+)", task["run"])
                ranks = int(task["resources"]["cpus"].removesuffix("+")) // int(threads)
                found += [(group, rank) for rank in range(task["num_nodes"] * ranks)]
        return found
    for (what, _), each in manifests(files).items():
        [container] = pod_of(each)["containers"] if what == "Job" else [{"command": ["sh"]}]
        if container["command"][0] != "sh":
            command = container["command"]
            group, threads = (command[command.index(option) + 1] for option in ("--group", "--threads"))
            ranks = int(container["resources"]["requests"]["cpu"]) // int(threads)
            found += [(group, rank) for rank in range(each["spec"]["completions"] * ranks)]
    return found


# Ranks and machines


@given(
    data_parallel=st.integers(1, 24),
    tensor_parallel=st.integers(1, 24),
    device=st.sampled_from(["cpu", "cuda"]),
    room=st.integers(1, 16),
)
def test_ranks_share_the_fewest_machines_evenly(
    data_parallel: int, tensor_parallel: int, device: str, room: int
) -> None:
    ranks = data_parallel * tensor_parallel
    got = machines(ranks, tensor_parallel, device, room)

    def is_possible(nodes: int) -> bool:
        """Layers stay on one machine each, or machines hold parts of one layer only."""
        if ranks % nodes or ranks // nodes > room:
            return False
        each = ranks // nodes
        homes = [
            {rank // each for rank in range(start, start + tensor_parallel)}
            for start in range(0, ranks, tensor_parallel)
        ]
        guests = [{rank // tensor_parallel for rank in range(node * each, (node + 1) * each)} for node in range(nodes)]
        return max(map(len, homes)) == 1 or max(map(len, guests)) == 1

    nodes = min(n for n in range(1, ranks + 1) if is_possible(n))
    each = ranks // nodes
    assert got == Machines(nodes, ranks=each, gpus=each if device == "cuda" else 0, cpus=each * CPUS_PER_RANK)


def test_ranks_that_read_a_microbatch_together_stay_on_one_machine() -> None:
    """Of 24 ranks 6 to a machine would cut fours; pipeline stages, which say little to each other, may be cut."""
    trainer = {"ranks": 24, "tensor_parallel": 2}
    layouts = [
        resolve("quickstart", {"trainer": trainer | {axis: 2}}) for axis in ("context_parallel", "pipeline_parallel")
    ]
    assert [lay_out(one, ranks_per_node=6).groups[0].machines.ranks for one in layouts] == [4, 6]
    threes = {"trainer": {"ranks": 6, "context_parallel": 3, "tensor_parallel": 2}}
    assert lay_out(config(threes), ranks_per_node=4).groups[0].machines[:2] == (3, 2), "no layer on two machines"


def test_ranks_that_divide_experts_stay_on_one_machine() -> None:
    divided = config({"trainer": {"ranks": 12, "expert_parallel": 4}})
    assert lay_out(divided, ranks_per_node=6).groups[0].machines[:2] == (3, 4)


@drawn(
    8,
    30,
    trainer=st.sampled_from([(1, 1), (2, 1), (8, 2), (12, 4), (16, 16)]),
    generator=st.sampled_from([(1, 1), (1, 2), (3, 1), (2, 4), (2, 16)]),
    devices=st.tuples(st.sampled_from(["cpu", "cuda"]), st.sampled_from(["cpu", "cuda"])),
    room=st.integers(1, 8),
)
def test_both_kinds_of_cluster_are_asked_for_the_same(
    trainer: tuple[int, int], generator: tuple[int, int], devices: tuple[str, str], room: int
) -> None:
    overrides = {
        "trainer": {"ranks": trainer[0], "tensor_parallel": trainer[1], "device": devices[0]},
        "generator": {"replicas": generator[0], "tensor_parallel": generator[1], "device": devices[1]},
    }
    slurm = slurm_files(config(overrides), Path("/f"), working_dir=Path("/w"), gpus_per_node=room)
    objects = manifests(kubernetes_files(config(overrides), "r", image="i", gpus_per_node=room))
    ranks = {"trainer": trainer[0], "generator": generator[1]}
    for group, job, device in (("trainer", "r-trainer", devices[0]), ("generator", "r-generator-0", devices[1])):
        asked, spec = sbatch_options(slurm[f"{group}.sbatch"]), objects["Job", job]["spec"]
        [container] = spec["template"]["spec"]["containers"]
        resources = container["resources"]
        nodes = int(asked["nodes"])
        assert spec["completions"] == spec["parallelism"] == nodes
        assert asked["ntasks-per-node"] == "1"
        assert ranks[group] % nodes == 0
        each = ranks[group] // nodes
        assert each <= room
        gpus = [f"gpu:{each}"] if device == "cuda" else []
        assert [value for name, value in asked.items() if name == "gres"] == gpus
        assert resources.get("limits", {}) == ({"nvidia.com/gpu": str(each)} if gpus else {})
        assert resources["requests"]["cpu"] == asked["cpus-per-task"] == str(8 * each)
    assert sbatch_options(slurm["generator.sbatch"])["array"] == f"0-{generator[0] - 1}"
    assert len([name for kind, name in objects if kind == "Job"]) == 2 + generator[0]


def test_ranks_that_share_a_models_layers_stay_on_one_machine() -> None:
    kl = {"coef": 0.1, "executor": "own", "device": "cuda", "ranks": 12}
    for divided, found in (({}, Machines(2, 6, 6, 48)), ({"tensor_parallel": 4}, Machines(3, 4, 4, 32))):
        jobs = lay_out(resolve("quickstart", {"kl": kl | divided})).groups
        assert [job.machines for job in jobs if job.kind == "reference"] == [found]


def test_the_controller_has_cores_for_what_scores() -> None:
    rewards: list[dict[str, Any]] = [{}, {"num_workers": 9}, {"num_workers": 9, "models": [{"path": "scorer"}]}]
    scripts = [run_files("slurm", {"rewards": each})["controller.sbatch"] for each in rewards]
    assert [int(sbatch_options(script)["cpus-per-task"]) for script in scripts] == [3, 11, 19]


@pytest.mark.parametrize(
    ("remote", "gpus", "ranks"),
    [
        (None, None, 0),
        (["reference", "reward_models"], None, 0),
        (["trainer", "reference"], "gpu:2", 2),
        (["reward_models"], "gpu:4", 4),
        ([], "gpu:4", 6),
    ],
)
def test_the_controller_has_gpus_for_what_stays_with_it(remote: list[str] | None, gpus: str | None, ranks: int) -> None:
    """Reward models and reference share them; each process has cores."""
    rewards: dict[str, Any] = {"models": [{"path": "scorer"}], "device": "cuda", "model_ranks": 2}
    overrides = {"rewards": rewards, "kl": {"coef": 0.1, "executor": "own", "device": "cuda", "ranks": 4}}
    asked = sbatch_options(run_files("slurm", overrides, remote=remote)["controller.sbatch"])
    assert (asked.get("gres"), asked["cpus-per-task"]) == (gpus, str(2 + 1 + 8 * ranks))
    objects = manifests(run_files("kubernetes", overrides, remote=remote))
    [container] = pod_of(objects["Job", "run-a-controller"])["containers"]
    assert container["resources"].get("limits", {}) == ({"nvidia.com/gpu": gpus[4:]} if gpus else {})
    assert container["resources"]["requests"]["cpu"] == asked["cpus-per-task"]


def test_a_stage_that_computes_on_a_gpu_does_so_on_the_controllers_machine() -> None:
    models = {"models": [{"path": "scorer"}], "device": "cuda", "model_ranks": 2}
    for overrides, gpus in (
        ({"rewards": models}, None),
        ({"rewards": models, "stages": ["rl", "evaluate"]}, "gpu:1"),
        ({"gold": models | {"model_ranks": 1}, "stages": ["rl", "evaluate"]}, "gpu:1"),
        ({"gold": models | {"model_ranks": 1, "device": "cpu"}, "stages": ["rl", "evaluate"]}, None),
        ({"trainer": {"device": "cuda"}, "generator": {"device": "cuda"}}, None),
        ({"trainer": {"device": "cuda"}, "stages": ["sft", "rl"]}, "gpu:1"),
        ({"generator": {"device": "cuda"}, "stages": ["rl", "evaluate"]}, "gpu:1"),
        ({"generator": {"device": "cuda"}, "stages": ["sft", "rl"]}, None),
    ):
        assert sbatch_options(run_files("slurm", overrides)["controller.sbatch"]).get("gres") == gpus, overrides


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_does_not_fit_beside_the_controller_is_told_where_it_would(kind: str, device: str) -> None:
    overrides = SCORING | {"rewards": SCORING["rewards"] | {"device": device}}
    with pytest.raises(ConfigError, match=r"no room for 'reward_models'(?s:.*)--remote reference reward_models"):
        run_files(kind, overrides, remote=["reference"])
    run_files(kind, overrides, remote=["reference", "reward_models"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["reward_models", "reference", "rewards", "controller", "generator-0", "x; y"])
def test_a_group_that_the_run_does_not_have_gets_no_job(kind: str, name: str) -> None:
    with pytest.raises(ConfigError, match="no such group could join this run"):
        run_files(kind, GPUS, remote=[name])


@drawn(
    12,
    40,
    kind=st.sampled_from(KINDS),
    trainer=st.sampled_from([(1, 1), (12, 4)]),
    generator=st.sampled_from([(1, 1), (3, 2)]),
    reward_models=st.tuples(st.integers(0, 20), st.sampled_from(["cpu", "cuda"])),
    reference=st.tuples(st.integers(0, 20), st.sampled_from(["cpu", "cuda"])),
    room=st.integers(1, 9),
    remote=st.none() | st.sets(st.sampled_from(["reward_models", "reference"])),
)
def test_every_rank_that_the_controller_waits_for_has_one_place(
    kind: str,
    trainer: tuple[int, int],
    generator: tuple[int, int],
    reward_models: tuple[int, str],
    reference: tuple[int, str],
    room: int,
    remote: set[str] | None,
) -> None:
    """The controller's own pipeline, built from its own command line, says who has to join."""
    models = [{"path": "scorer"}] if reward_models[0] else []
    rewards = {"models": models, "model_ranks": max(1, reward_models[0]), "device": reward_models[1]}
    kl = {"coef": 0.1, "executor": "own", "ranks": reference[0], "device": reference[1]} if reference[0] else {}
    overrides = {
        "trainer": {"ranks": trainer[0], "tensor_parallel": trainer[1]},
        "generator": {"replicas": generator[0], "tensor_parallel": generator[1]},
        "rewards": rewards,
        "kl": kl,
    }
    scorers = {"reward_models": reward_models, "reference": reference}
    has = {name for name, (ranks, _) in scorers.items() if ranks}
    on_cuda = {name for name, (_, device) in scorers.items() if device == "cuda"}
    leaving = has & (on_cuda if remote is None else remote)
    wanted = None if remote is None else leaving
    if any(scorers[name][0] > room for name in has - leaving):
        with pytest.raises(ConfigError, match="--remote"):
            run_files(kind, overrides, remote=wanted, gpus_per_node=room)
        wanted = leaving = has
    files = run_files(kind, overrides, remote=wanted, gpus_per_node=room)
    assert controller_remote(kind, files) == leaving
    pipeline = nodes(config(overrides), remote=ALWAYS_REMOTE | leaving)
    expected = [(node.name, rank) for node in pipeline if node.host == "torchrun" for rank in range(node.ranks)]
    assert sorted(placed(kind, files)) == sorted(expected)


def test_a_vllm_replica_has_the_gpus_of_its_own_tensor_parallelism() -> None:
    overrides: dict[str, Any] = {
        "generator": {"engine": "vllm", "replicas": 2, "tensor_parallel": 4},
    }
    assert "gres" not in sbatch_options(run_files("slurm", overrides)["generator.sbatch"])
    overrides["trainer"] = {"device": "cuda"}
    options = sbatch_options(run_files("slurm", overrides)["generator.sbatch"])
    assert (options["gres"], options["nodes"], options["cpus-per-task"]) == ("gpu:4", "1", "32")
    with pytest.raises(ConfigError, match=r"vLLM runs on one machine\n.*generator.tensor_parallel = 4"):
        slurm_files(config(overrides), Path("/f"), working_dir=Path("/w"), gpus_per_node=2)


def test_a_teacher_in_vllm_has_the_gpus_of_its_tensor_parallelism() -> None:
    vllm = {"engine_args": {"tensor_parallel_size": 4}}
    teacher = {"path": "t", "coef": 0.1, "executor": "own", "top_k": 4, "engine": "vllm", "vllm": vllm}
    overrides: dict[str, Any] = {"teacher": teacher}
    assert "teacher.sbatch" not in run_files("slurm", overrides), "the trainer has no GPUs: it stays"
    overrides["trainer"] = {"device": "cuda"}
    script = run_files("slurm", overrides)["teacher.sbatch"]
    assert sbatch_options(script)["gres"] == "gpu:4"
    assert sbatch_options(script)["nodes"] == "1"
    with pytest.raises(ConfigError, match="vLLM runs on one machine"):
        run_files("slurm", overrides, gpus_per_node=2)


def test_a_numbered_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="sees its own GPUs only"):
        run_files("slurm", {"generator": {"device": "cuda:1"}})


# What holds for all files


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overrides", [{}, GPUS, WIDE, SCORING], ids=["cpu", "gpus", "wide", "scoring"])
def test_files_are_well_formed_and_hold_no_key(kind: str, overrides: dict[str, Any], monkeypatch: Any) -> None:
    key = RunKeys.new().as_environment()
    for name, value in key.items():
        monkeypatch.setenv(name, value)
    files = run_files(kind, overrides)
    assert files == run_files(kind, overrides), "files depend on nothing but the configuration"
    for name, text in files.items():
        assert not any(value in text for value in key.values()), name
        assert not re.search(r"[0-9a-f]{64}", text), name
        assert text.endswith("\n"), name
        if name.endswith((".sh", ".sbatch")):
            checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
            assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_is_the_whole_configuration(kind: str) -> None:
    files = run_files(kind, GPUS)
    text = files.get("recipe.toml") or manifests(files)["ConfigMap", "run-a"]["data"]["recipe.toml"]
    assert resolve(tomllib.loads(text)) == config(GPUS)


# SLURM


@pytest.mark.parametrize(
    ("group", "overrides", "num_nodes", "ranks"),
    [
        ("trainer", {}, 1, 1),
        ("trainer", GPUS, 2, 8),
        ("reward_models", SCORING, 2, 6),
        ("reference", SCORING, 1, 2),
    ],
)
def test_a_group_starts_on_each_of_its_nodes(
    cluster: Cluster, group: str, overrides: dict[str, Any], num_nodes: int, ranks: int
) -> None:
    cluster.slurm(overrides, partition="gpu", time="1-00:00:00")
    (cluster.folder / "address").write_text("10.0.0.1:5\n")
    assert cluster.job(f"{group}.sbatch") == 0
    calls = cluster.calls("slipstream")
    assert len(calls) == num_nodes
    for rank, (arguments, _, folder, _) in enumerate(calls):
        options = parsed(arguments)
        assert folder == str(cluster.work)
        assert (options.group, options.address, options.threads) == (group, "10.1.2.3", 8)
        assert (options.controller, options.key_file) == (str(cluster.folder / "address"), cluster.folder / "key")
        assert cli._job(options).shutdown_grace_s == 25.0, "a group takes what its own job file gives it"
        assert options.join_timeout == JOB_JOIN_TIMEOUT_S
        if num_nodes == 1:
            assert (options.nnodes, options.node_rank, options.rendezvous) == (None, None, None)
        else:
            assert (options.nnodes, options.node_rank, options.rendezvous) == (2, rank, "node-a:24567")
    [srun] = cluster.arguments("srun")
    assert f"--cpus-per-task={8 * ranks}" in srun
    assert not cluster.arguments("scontrol")
    asked = sbatch_options((cluster.folder / f"{group}.sbatch").read_text())
    assert (asked["partition"], asked["time"], "array" in asked) == ("gpu", "1-00:00:00", False)
    assert asked.get("gres") == (f"gpu:{ranks}" if overrides else None)


def test_each_replica_is_an_element_of_an_array(cluster: Cluster) -> None:
    cluster.slurm(GPUS)
    (cluster.folder / "address").write_text("10.0.0.1:5\n")
    for replica in range(3):
        assert cluster.job("generator.sbatch", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID=str(replica)) == 0
    groups = [parsed(arguments).group for arguments in cluster.arguments("slipstream")]
    assert groups == ["generator-0", "generator-1", "generator-2"]


@pytest.mark.parametrize(
    ("script", "code", "restarts", "again"),
    with_slow(
        [
            ("controller.sbatch", 0, 0, False),
            ("controller.sbatch", 137, CONTROLLER_RESTARTS - 1, True),
            ("controller.sbatch", 1, CONTROLLER_RESTARTS, False),
            ("controller.sbatch", 130, 0, False),
            ("trainer.sbatch", 1, GROUP_RESTARTS - 1, True),
            ("trainer.sbatch", 1, GROUP_RESTARTS, False),
            ("generator.sbatch", 1, 0, True),
            ("reward_models.sbatch", 1, 0, True),
            ("reference.sbatch", 2, 0, False),
        ],
        [
            ("controller.sbatch", 1, 0, True),
            ("controller.sbatch", 2, 0, False),
            ("generator.sbatch", 0, 0, False),
            ("generator.sbatch", 2, 0, False),
        ],
    ),
)
def test_a_job_that_failed_starts_again_by_itself_and_alone(
    cluster: Cluster, script: str, code: int, restarts: int, again: bool
) -> None:
    cluster.slurm(SCORING)
    (cluster.folder / "address").write_text("10.0.0.1:5\n")
    environment = {"EXIT": str(code)} | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})
    if script == "generator.sbatch":  # as for the last element: its job id is the array's
        environment |= {"SLURM_ARRAY_JOB_ID": "1234567", "SLURM_ARRAY_TASK_ID": "2"}
    assert cluster.job(script, **environment) == code
    name = "1234567_2" if script == "generator.sbatch" else "1234567"
    assert cluster.arguments("scontrol") == ([["requeue", name]] if again else [])
    assert "requeue" in sbatch_options((cluster.folder / script).read_text())


def test_the_controller_listens_where_others_reach_it_and_goes_on_with_its_run(cluster: Cluster) -> None:
    cluster.slurm({})
    run = cluster.folder / "run"
    assert cluster.job("controller.sbatch") == 0
    assert not (cluster.folder / "address").exists(), "nobody is sent to a controller that has ended"
    run.mkdir()
    (run / "config.toml").write_text("")
    assert cluster.job("controller.sbatch") == 0
    first, second = map(parsed, cluster.arguments("slipstream"))
    assert (first.recipe, first.out, first.resume) == (str(cluster.folder / "recipe.toml"), run, None)
    assert (second.recipe, second.out, second.resume) == (str(cluster.folder / "recipe.toml"), None, run)
    for _, seen, *_ in cluster.calls("slipstream"):
        assert shlex.split(seen["SLIPSTREAM_GO_ON"]) == [str(cluster.folder / "submit.sh")], "a command to be copied"
    for options in (first, second):
        assert options.join_timeout == JOB_JOIN_TIMEOUT_S
        assert (options.group, options.listen) == ("controller", "10.1.2.3:0")
        assert (options.key_file, options.address_file) == (cluster.folder / "key", cluster.folder / "address")
        assert options.remote is None


def test_the_controller_waits_for_the_groups_that_have_jobs(cluster: Cluster) -> None:
    cluster.slurm(SCORING)
    assert cluster.job("controller.sbatch") == 0
    (cluster.folder / "run").mkdir()
    (cluster.folder / "run" / "config.toml").write_text("")
    assert cluster.job("controller.sbatch") == 0
    first, second = map(parsed, cluster.arguments("slipstream"))
    assert first.remote == second.remote == ("reward_models", "reference")
    assert (first.resume, second.resume) == (None, cluster.folder / "run")


def test_submitting_makes_a_private_key_and_ties_the_groups_to_the_controller(cluster: Cluster) -> None:
    cluster.slurm(GPUS)
    submit = str(cluster.folder / "submit.sh")
    (cluster.folder / "address").write_text("stale")
    assert cluster.run(submit, SLIPSTREAM_RUN_KEY="not this one") == 0
    assert cluster.arguments("sbatch") == [
        ["--parsable", "controller.sbatch"],
        ["--parsable", "--dependency=after:101", "trainer.sbatch"],
        ["--parsable", "--dependency=after:101", "generator.sbatch"],
        ["--parsable", "--dependency=afterany:101", "end.sbatch", "102", "103"],
    ]
    assert all("SLIPSTREAM_RUN_KEY" not in environment for _, environment, _, _ in cluster.calls("sbatch"))
    assert all(folder == str(cluster.folder) for _, _, folder, _ in cluster.calls("sbatch"))
    key = cluster.folder / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    keys = RunKeys.load(key)
    assert not (cluster.folder / "address").exists()
    assert (cluster.folder / "logs").is_dir()
    assert (cluster.folder / "jobs").read_text().split() == ["101", "102", "103", "104"]

    assert cluster.run(submit, QUEUED="101 R") == 1, "two controllers would share one run's folder"
    assert len(cluster.arguments("sbatch")) == 4
    assert cluster.run(submit) == 0
    assert RunKeys.load(key) == keys
    assert cluster.arguments("sbatch")[-1] == ["--parsable", "--dependency=afterany:105", "end.sbatch", "106", "107"]


def test_what_was_submitted_is_taken_back_when_a_job_is_refused(cluster: Cluster) -> None:
    cluster.slurm(GPUS)
    assert cluster.run(str(cluster.folder / "submit.sh"), REFUSED="generator.sbatch") != 0
    assert cluster.arguments("scancel") == [["101", "102"]]
    assert not (cluster.folder / "jobs").exists()


def test_the_last_job_cancels_the_groups(cluster: Cluster) -> None:
    cluster.slurm({}, time="1-00:00:00")
    assert cluster.job("end.sbatch", "102", "103") == 0
    assert cluster.arguments("scancel") == [["102", "103"]]
    assert sbatch_options((cluster.folder / "end.sbatch").read_text())["time"] == "5"


@pytest.mark.parametrize("overrides", [pytest.param({}, marks=pytest.mark.slow), SCORING], ids=["cpu", "scoring"])
def test_every_job_ends_with_the_controller(cluster: Cluster, overrides: dict[str, Any]) -> None:
    cluster.slurm(overrides)
    assert cluster.run(str(cluster.folder / "submit.sh")) == 0
    submitted = {next(a for a in call if a.endswith(".sbatch")): call for call in cluster.arguments("sbatch")}
    scripts = [path.name for path in cluster.folder.glob("*.sbatch")]
    assert sorted(submitted) == sorted(scripts)
    ids = dict(zip(submitted, (cluster.folder / "jobs").read_text().split(), strict=True))
    groups = [ids[script] for script in scripts if script not in ("controller.sbatch", "end.sbatch")]
    for script in scripts:
        tie = {"controller.sbatch": [], "end.sbatch": [f"--dependency=afterany:{ids['controller.sbatch']}"]}
        expected = tie.get(script, [f"--dependency=after:{ids['controller.sbatch']}"])
        assert [option for option in submitted[script] if "dependency" in option] == expected
    end = submitted["end.sbatch"]
    assert cluster.job("end.sbatch", *end[end.index("end.sbatch") + 1 :]) == 0
    [cancelled] = cluster.arguments("scancel")
    assert sorted(cancelled) == sorted(groups)


PATH_CHARACTERS = st.characters(exclude_characters="/\x7f", exclude_categories=["Cs"], min_codepoint=32)


@drawn(3, 12, name=st.text(PATH_CHARACTERS, min_size=1, max_size=12))
def test_any_path_is_quoted(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    if name in (".", ".."):
        return
    root = tmp_path_factory.mktemp("cluster")
    cluster = Cluster(root)
    cluster.folder = root / name if name not in ("bin", "my work") else cluster.folder
    cluster.folder.mkdir(exist_ok=True)
    cluster.work = cluster.folder
    cluster.slurm({})
    (cluster.folder / "address").write_text("10.0.0.1:5\n")
    assert cluster.job("trainer.sbatch") == 0
    [(arguments, _, folder, _)] = cluster.calls("slipstream")
    assert (parsed(arguments).key_file, folder) == (cluster.folder / "key", str(cluster.folder))
    job_name = sbatch_options((cluster.folder / "trainer.sbatch").read_text())["job-name"]
    assert re.fullmatch(r"[\w.-]+-trainer", job_name)
    shutil.rmtree(root)


@pytest.mark.parametrize("option", ["partition", "account", "time"])
@pytest.mark.parametrize("value", ["a b", "a\n#SBATCH --wrap=x", "", "$(id)"])
def test_options_that_would_not_be_one_word_are_refused(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option} is no name"):
        slurm_files(config(), Path("/f"), working_dir=Path("/w"), **{option: value})  # type: ignore[arg-type]


# Kubernetes


@pytest.mark.parametrize(
    "overrides", [{}, pytest.param(GPUS, marks=pytest.mark.slow), SCORING], ids=["cpu", "gpus", "scoring"]
)
def test_pods_find_each_other_through_one_headless_service(overrides: dict[str, Any]) -> None:
    objects = manifests(run_files("kubernetes", overrides))
    service = objects["Service", "run-a"]["spec"]
    assert service["clusterIP"] == "None"
    names, commands = set(), []
    for (kind, name), each in objects.items():
        assert each["metadata"]["namespace"] == "team"
        if kind != "Job":
            continue
        spec, pod = each["spec"], pod_of(each)
        assert (spec["completionMode"], pod["restartPolicy"], pod["subdomain"]) == ("Indexed", "Never", "run-a")
        assert service["selector"].items() <= spec["template"]["metadata"]["labels"].items()
        [container] = pod["containers"]
        environment = {item["name"]: item["valueFrom"] for item in container["env"]}
        assert environment["SLIPSTREAM_RUN_KEY"] == {"secretKeyRef": {"name": "run-a", "key": "key"}}
        assert environment["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        for index in range(spec["completions"]):
            names.add(f"{name}-{index}.run-a")
            filled = {"POD_IP": "10.2.0.7", "JOB_COMPLETION_INDEX": str(index)}
            command = container["command"]
            for variable, value in filled.items():
                command = [part.replace(f"$({variable})", value) for part in command]
            if "controller" not in name:
                commands.append(parsed(command[1:]))
    replicas = config(overrides).generator.replicas
    scorers = {"reward_models", "reference"} if overrides is SCORING else set()
    expected = {"trainer"} | {f"generator-{r}" for r in range(replicas)} | scorers
    assert {options.group for options in commands} == expected
    for options in commands:
        controller, port = options.controller.split(":")
        assert controller in names
        assert int(port) == service["ports"][0]["port"]
        assert options.address == "10.2.0.7"
        assert cli._job(options).group == options.group
        job = cli._job(options)
        assert (job.join_timeout, job.out, job.steps) == (
            JOB_JOIN_TIMEOUT_S, Path("/slipstream/runs/run-a"), config(overrides).steps
        )  # fmt: skip
        if options.rendezvous is not None:
            assert options.rendezvous.split(":")[0] in names
            assert f"-{options.group.replace('_', '-')}-0." in options.rendezvous
    on_two = {options.group for options in commands if options.nnodes == 2}
    assert on_two == (({"trainer"} if overrides else set()) | (scorers - {"reference"}))
    for group in expected:
        places = [(options.nnodes, options.node_rank) for options in commands if options.group == group]
        assert places == ([(2, 0), (2, 1)] if group in on_two else [(None, None)])


def test_names_of_pods_are_names_of_dns() -> None:
    name = "a" * 40
    overrides = SCORING | {"generator": {"replicas": 11}}
    for (_, each), value in manifests(kubernetes_files(config(overrides), name, image="i")).items():
        index = value["spec"]["completions"] - 1 if value["kind"] == "Job" else 0
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", f"{each}-{index}"), each


@pytest.mark.parametrize("overrides", [{}, SCORING], ids=["cpu", "scoring"])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_controllers_pod_goes_on_with_its_run(
    cluster: Cluster, is_resumed: bool, overrides: dict[str, Any]
) -> None:
    objects = manifests(run_files("kubernetes", overrides))
    [container] = pod_of(objects["Job", "run-a-controller"])["containers"]
    volume = cluster.root / "volume"
    if is_resumed:
        (volume / "runs" / "run-a").mkdir(parents=True)
        (volume / "runs" / "run-a" / "config.toml").write_text("")
    command = [part.replace("/slipstream/runs", str(volume / "runs")) for part in container["command"]]
    environment = {"PATH": f"{cluster.bin}:{os.environ['PATH']}", "POD_IP": "10.2.0.7"}
    assert subprocess.run(command, env=environment, timeout=60).returncode == 0
    options = parsed(cluster.arguments("slipstream")[0])
    run = volume / "runs" / "run-a"
    assert (options.group, options.listen) == ("controller", "10.2.0.7:29400")
    assert options.remote == (("reward_models", "reference") if overrides else None)
    assert options.recipe == "/etc/slipstream/recipe.toml"
    assert (options.out, options.resume) == ((None, run) if is_resumed else (run, None))
    assert options.join_timeout == JOB_JOIN_TIMEOUT_S
    assert "run-a" in cluster.calls("slipstream")[0][1]["SLIPSTREAM_GO_ON"]


def test_bad_input_ends_a_job_and_lost_machines_do_not_count() -> None:
    jobs = {name: each for (kind, name), each in manifests(run_files("kubernetes", SCORING)).items() if kind == "Job"}
    limits = {name: each["spec"]["backoffLimit"] for name, each in jobs.items()}
    assert limits == {
        "run-a-controller": CONTROLLER_RESTARTS,
        "run-a-trainer": 2 * GROUP_RESTARTS,
        "run-a-reward-models": 2 * GROUP_RESTARTS,
        "run-a-reference": GROUP_RESTARTS,
        **{f"run-a-generator-{replica}": GROUP_RESTARTS for replica in range(3)},
    }
    for job in jobs.values():
        fail, ignore = job["spec"]["podFailurePolicy"]["rules"]
        [container] = pod_of(job)["containers"]
        assert fail["action"] == "FailJob"
        assert fail["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
        assert ignore["action"] == "Ignore"
        assert ignore["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        waits = {each["key"].partition("/")[2]: each["tolerationSeconds"] for each in pod_of(job)["tolerations"]}
        assert waits == {"unreachable": 30, "not-ready": 30}, "a machine that is gone is not waited for five minutes"
        assert {each["effect"] for each in pod_of(job)["tolerations"]} == {"NoExecute"}


def test_submitting_passes_a_key_through_a_pipe_and_applies_everything(cluster: Cluster) -> None:
    files = run_files("kubernetes", SCORING)
    cluster.write(files)
    submit = str(cluster.folder / "submit.sh")
    assert cluster.run(submit, MISSING="secret persistentvolumeclaim") == 0
    calls = cluster.calls("kubectl")
    assert all("--namespace=team" in arguments for arguments, *_ in calls)
    [stdin] = [stdin for arguments, *_, stdin in calls if "create" in arguments]
    RunKeys.take({"SLIPSTREAM_RUN_KEY": stdin})
    assert not any(stdin in part for arguments, *_ in calls for part in arguments)
    assert not any(stdin in path.read_text() for path in cluster.folder.iterdir())
    applied = {
        part.split("=")[1] for arguments, *_ in calls if "apply" in arguments for part in arguments if ".yaml" in part
    }
    assert applied == {name for name in files if name.endswith(".yaml")}

    assert cluster.run(submit) == 0
    later = cluster.arguments("kubectl")[len(calls) :]
    assert not any("create" in arguments or "--filename=volume.yaml" in arguments for arguments in later)
    assert any("delete" in arguments and "jobs" in arguments for arguments in later)
    before = len(cluster.arguments("kubectl"))
    assert cluster.run(submit, ACTIVE="run-a-controller") == 1
    assert len(cluster.arguments("kubectl")) == before + 1


@pytest.mark.parametrize("name", ["Run", "1a", "a-", "a b", "", "a" * 41, "é"])
def test_names_that_kubernetes_refuses_are_refused_first(name: str) -> None:
    with pytest.raises(ConfigError, match="no name that Kubernetes takes"):
        kubernetes_files(config(), name, image="i")


@pytest.mark.parametrize("image", [None, "", "a b"])
def test_an_image_is_needed(image: str | None) -> None:
    with pytest.raises(ConfigError, match="an image is needed"):
        kubernetes_files(config(), "run", image=image)


# SkyPilot


@pytest.mark.parametrize(
    "overrides", [{}, pytest.param(GPUS, marks=pytest.mark.slow), SCORING], ids=["cpu", "gpus", "scoring"]
)
def test_tasks_find_each_other_by_the_names_of_their_group(overrides: dict[str, Any], cluster: Cluster) -> None:
    files = run_files("skypilot", overrides)
    header = next(documents(files["run.yaml"]))
    assert (header["name"], header["execution"], header["primary_tasks"]) == ("run-a", "parallel", ["controller"])
    commands, expected = [], {}
    for name, task in tasks(files).items():
        resources, nodes = task["resources"], task["num_nodes"]
        assert resources["image_id"] == "docker:r/s:1"
        assert task["volumes"] == {"/slipstream": "slipstream"}
        assert task["secrets"] == {"SLIPSTREAM_RUN_KEY": ""}
        restarts = CONTROLLER_RESTARTS if name == "controller" else GROUP_RESTARTS
        assert resources["job_recovery"] == {"max_restarts_on_errors": restarts}
        if name == "controller":
            continue
        ranks = {group: number + 1 for group, number in placed("skypilot", {"run.yaml": files["run.yaml"]})}
        expected[name] = ranks[name.replace("reward-models", "reward_models")] // nodes
        assert resources.get("accelerators") == (f"H100:{expected[name]}" if overrides else None)
        ips = "\n".join(f"10.0.0.{index + 1}" for index in range(nodes))
        for rank in range(nodes):
            given = {"SKYPILOT_NODE_IPS": ips, "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_JOBGROUP_NAME": "run-a"}
            (cluster.root / "script").write_text(task["run"].replace("cd /slipstream\n", ""))
            assert cluster.run("script", **given) == 0
            options = parsed(cluster.arguments("slipstream")[-1])
            commands.append(options)
            assert options.controller == "controller-0.run-a:29400"
            assert (options.address, options.join_timeout) == (f"10.0.0.{rank + 1}", JOB_JOIN_TIMEOUT_S)
            several = (nodes, rank, "10.0.0.1:29500") if nodes > 1 else (None, None, None)
            assert (options.nnodes, options.node_rank, options.rendezvous) == several
    scorers = {"reward_models", "reference"} if overrides is SCORING else set()
    replicas = {f"generator-{replica}" for replica in range(config(overrides).generator.replicas)}
    assert {options.group for options in commands} == {"trainer"} | replicas | scorers


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_controllers_task_goes_on_with_its_run(cluster: Cluster, is_resumed: bool) -> None:
    controller = tasks(run_files("skypilot", SCORING))["controller"]
    assert controller["file_mounts"] == {"/tmp/slipstream/recipe.toml": "recipe.toml"}
    volume = cluster.root / "volume"
    if is_resumed:
        (volume / "runs" / "run-a").mkdir(parents=True)
        (volume / "runs" / "run-a" / "config.toml").write_text("")
    (volume).mkdir(exist_ok=True)
    (cluster.root / "script").write_text(
        controller["run"].replace("/slipstream/runs", f"{volume}/runs").split("\n", 1)[1]
    )
    assert cluster.run("script", SKYPILOT_NODE_IPS="10.0.0.7\n10.0.0.8") == 0
    options = parsed(cluster.arguments("slipstream")[0])
    run = volume / "runs" / "run-a"
    assert (options.group, options.listen) == ("controller", "10.0.0.7:29400")
    assert options.remote == ("reward_models", "reference")
    assert options.recipe == "/tmp/slipstream/recipe.toml"
    assert (options.out, options.resume) == ((None, run) if is_resumed else (run, None))
    assert options.join_timeout == JOB_JOIN_TIMEOUT_S


def test_launching_a_job_group_keeps_its_key_out_of_arguments(cluster: Cluster) -> None:
    cluster.write(run_files("skypilot", GPUS))
    submit = str(cluster.folder / "submit.sh")
    assert cluster.run(submit) == 0
    key = (cluster.folder / "key").read_text()
    RunKeys.take({"SLIPSTREAM_RUN_KEY": key})
    assert stat.S_IMODE((cluster.folder / "key").stat().st_mode) == 0o600
    asked = cluster.calls("sky")
    assert not any(key in part for arguments, *_ in asked for part in arguments)
    [(arguments, environment, folder, _)] = [call for call in asked if "launch" in call[0]]
    assert arguments == ["jobs", "launch", "--yes", "--detach-run", "--secret", "SLIPSTREAM_RUN_KEY", "run.yaml"]
    assert environment["SLIPSTREAM_RUN_KEY"] == key
    assert folder == str(cluster.folder)
    assert cluster.run(submit, ACTIVE="my-run-a") == 0, "another run"
    assert cluster.run(submit, ACTIVE="run-a") == 1
    assert (cluster.folder / "key").read_text() == key


@pytest.mark.parametrize("name", ["1a", "a-", "a b", "", "a" * 41, "a_b"])
def test_names_that_skypilot_refuses_are_refused_first(name: str) -> None:
    with pytest.raises(ConfigError, match="no name that SkyPilot takes"):
        skypilot_files(config(), name, image="i")


def test_skypilot_is_told_which_gpus() -> None:
    with pytest.raises(ConfigError, match="--accelerator NAME"):
        skypilot_files(config(GPUS), "a", image="i")
    for option in ("accelerator", "infra"):
        with pytest.raises(ConfigError, match=f"--{option} is no name"):
            skypilot_files(config(), "a", image="i", **{option: "a b"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an image is needed"):
        skypilot_files(config(), "a", image=None)


# The command


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_writes_the_files_and_starts_nothing(kind: str, cluster: Cluster, monkeypatch: Any) -> None:
    monkeypatch.chdir(cluster.work)
    monkeypatch.setenv("PATH", f"{cluster.bin}:{os.environ['PATH']}")
    monkeypatch.setattr(cli, "_console", Console(file=io.StringIO()))
    folder = cluster.root / "jobs-a"
    argv = ["launch", "quickstart", f"--{kind}", str(folder), "--image", "i:1", "--trainer.ranks", "2"]
    assert cli.main(argv) == 0
    files = {path.name: path for path in folder.iterdir()}
    assert os.access(files["submit.sh"], os.X_OK)
    assert not (cluster.root / "calls").exists()
    if kind == "slurm":
        assert resolve(files["recipe.toml"]).trainer.ranks == 2
        assert f"cd '{cluster.work}'" in files["trainer.sbatch"].read_text()
    elif kind == "skypilot":
        assert resolve(files["recipe.toml"]).trainer.ranks == 2
        assert "name: jobs-a\n" in files["run.yaml"].read_text()
    else:
        assert "name: jobs-a-trainer" in files["trainer.yaml"].read_text()
    assert cli.main(argv) == 2, "files that somebody may have changed are not written over"


def test_the_command_knows_who_leaves_the_controller(cluster: Cluster, monkeypatch: Any) -> None:
    """`--remote`, with names or without, or the groups on CUDA; where nothing is to be told it is refused."""
    monkeypatch.chdir(cluster.work)
    monkeypatch.setattr(cli, "_console", Console(file=io.StringIO()))
    says = io.StringIO()
    monkeypatch.setattr(cli, "_errors", Console(file=says, width=200))
    own = ["--kl.coef", "0.1", "--kl.executor", "own", "--kl.device", "cuda"]

    def launch(folder: str, *options: str) -> set[str]:
        assert cli.main(["launch", "quickstart", "--slurm", str(cluster.root / folder), *own, *options]) == 0
        return {path.stem for path in (cluster.root / folder).glob("*.sbatch")} - {"controller", "end"}

    assert launch("a") == launch("b", "--remote", "reference") == {"trainer", "generator", "reference"}
    assert launch("c", "--remote") == {"trainer", "generator"}
    for argv in (
        ["quickstart", "--slurm", "d", "--remote", "reward_models"],
        ["quickstart", "--kubernetes", "e", "--image", "i", "--remote", "reward_models"],
        ["quickstart", "--group", "controller", "--key-file", "key", "--remote", "reward_models"],
    ):
        says.truncate(0)
        assert cli.main(["launch", *argv]) == 2
        assert "no such group could join this run" in says.getvalue()
    assert cli.main(["launch", "--group", "trainer", "--controller", "x:1", "--remote", "reference"]) == 2
    assert "the controller is told which groups join it" in says.getvalue()
    assert {path.name for path in cluster.work.iterdir()} <= {"key"}
