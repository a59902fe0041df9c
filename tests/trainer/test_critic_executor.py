"""A critic of its own executor trains as the trainer's own does, to the bit, while the policy is updated."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from covering import with_slow
from rank_threads import ThreadRanks, on_ranks, results
from training_data import TINY, load_checkpoint, make_groups, run_config, save_checkpoint, sharing_prompts

from slipstream.batching import collate
from slipstream.controller.build import _of_critic, default_pipeline
from slipstream.controller.placement import check_remote, computing_groups, place
from slipstream.core import recipes
from slipstream.core.channel import Ports, connect_local, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ChannelTimeout, CheckpointError, ConfigError, NonFiniteError
from slipstream.core.executor import Context
from slipstream.core.packed import PackedMicrobatch, TrainSequence
from slipstream.core.rank_group import RankGroup
from slipstream.core.spans import NoSpans
from slipstream.core.types import Group
from slipstream.jobs.machines import lay_out
from slipstream.models.build import build_policy
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import save_model
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.checkpoint import Checkpoints
from slipstream.trainer.checkpoint_folder import verify_checkpoint
from slipstream.trainer.critic import Critic
from slipstream.trainer.critic_executor import CriticModel
from slipstream.trainer.critic_link import CriticLink
from slipstream.trainer.measure import Auxiliary, Columns, with_columns
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch

FAST = {"lr": 1e-2, "max_grad_norm": 0.5}


def config_of(**changes: Any) -> RunConfig:
    critic = {"optimizer": FAST, "head_init": "reward", "clip": 0.05, **changes.pop("critic", {})}
    sections: dict[str, Any] = {
        "model": TINY,
        "loss": {"name": "ppo", "advantages": "gae", **changes.pop("loss", {})},
        "trainer": {"optimizer": FAST, "microbatch_tokens": 40, "minibatches": 2, "epochs": 2, "shuffle": True},
        "steps": 4,
    }
    return run_config(critic=critic, **{**sections, **changes})


def own(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"critic": config.critic.model_copy(update={"executor": "own"}), "host": "process"})


def channel(source: str, target: str) -> ChannelSpec:
    return ChannelSpec(f"{source}/{target}", Kind.BROADCAST, source, target)


@dataclass
class Apart:
    """A critic that runs in a thread, and the trainer's end of it."""

    critic: CriticModel
    link: CriticLink
    ports: dict[str, Ports]
    context: Context | None = None  # of the link


@contextmanager
def apart(config: RunConfig, run_dir: Path, *, resume: Path | None = None) -> Iterator[Apart]:
    """Start the critic; tell it at the end to stop, and wait until it has."""
    channels = [*_of_critic(config), channel("critic.events", "run.events"), channel("run.commands", "critic.commands")]
    ports = connect_local(channels, is_threaded=True)
    critic = CriticModel(config=config, batching=collate, resume=None if resume is None else str(resume))

    def context(name: str) -> Context:
        ends = ports[name]
        return Context(name, run_dir, ends.inputs, ends.outputs, NoSpans(), WallClock(), together=ends.together)

    critic.init(context("critic"))
    of_trainer = context("trainer")
    link = CriticLink(of_trainer, config, data_ranks=RankGroup.alone(), peers=RankGroup.alone())

    def serve() -> None:
        while not critic.is_finished:
            if not critic.step():
                wait(ports["critic"].inputs.values(), ports["critic"].outputs.values(), critic.wait_fds(), 0.5)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Apart(critic, link, ports, of_trainer)
    finally:
        link.stop()
        thread.join(60)
        assert not thread.is_alive()
        critic.close()
        for ends in ports.values():
            ends.close()


@dataclass
class Trained:
    policy: np.ndarray
    critic: dict[str, np.ndarray]
    metrics: list[dict[str, float]]
    trained: dict[str, Any]


def trained(
    config: RunConfig,
    batches: list[list[Group]],
    at: Apart | None = None,
    *,
    first: int = 0,
    load: Path | None = None,
) -> Trained:
    """Train one step on each batch; with the critic `at` its own executor, or inside, which is loaded, too."""
    model, _ = build_policy(config.model, seed=config.seed)
    optimizer = AdamW(FlatParameters(model), config.trainer.optimizer, total_updates=100)
    inside = Critic(config, model) if at is None else None
    if load is not None:
        of_critic = None if inside is None else (inside.module, inside.optimizer)
        load_checkpoint(load, (model, optimizer), critic=of_critic)
    auxiliary = Auxiliary(critic=inside, own_critic=None if at is None else at.link)
    found = []
    for number, groups in enumerate(batches, first):
        metrics = train_on_batch(
            model, optimizer, groups, config=config, step=number, batching=collate, auxiliary=auxiliary
        )
        found.append({name: value for name, value in metrics.items() if name != "train_s"})
    critic = inside or at.critic._critic  # type: ignore[union-attr]
    weights = {name: view.numpy().copy() for name, view in critic.parameters.named_views().items()}
    moments = {
        f"{m}/{n}": v.numpy().copy() for m, by in critic.optimizer.named_moments().items() for n, v in by.items()
    }
    models = {"policy": (model, optimizer), "critic": (critic.module, critic.optimizer)}
    return Trained(flat(model), weights | moments, found, models)


def flat(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([one.detach().flatten() for one in model.parameters()]).numpy().copy()


def batches(count: int, *, staleness: int = 0, given: bool = False) -> list[list[Group]]:
    made = (make_groups(seed=n, given=given, version=max(0, n - staleness)) for n in range(count))
    return [sharing_prompts(groups) for groups in made]


def assert_same(one: Trained, other: Trained) -> None:
    assert one.metrics == other.metrics
    np.testing.assert_array_equal(one.policy, other.policy)
    assert one.critic.keys() == other.critic.keys()
    for name, values in one.critic.items():
        np.testing.assert_array_equal(values, other.critic[name], err_msg=name)


ONE_EPOCH = {"optimizer": FAST, "microbatch_tokens": 40, "minibatches": 2, "shuffle": True}
CASES: dict[str, dict[str, Any]] = {
    "fresh": {"max_staleness": 0},
    "stale": {"max_staleness": 2},
    "vtrace": {
        "max_staleness": 2,
        "trainer": ONE_EPOCH,
        "critic": {"vtrace": True, "gamma": 0.9, "score_place": "after_last"},
        "loss": {"name": "aipo_masked"},
    },
    "whitened": {"max_staleness": 1, "critic": {"whiten_rewards": True}, "loss": {"whiten_advantages": "minibatch"}},
}


@pytest.mark.parametrize("case", with_slow(["vtrace", "whitened"], ["fresh", "stale"]))
def test_it_trains_as_the_trainers_own_to_the_bit(case: str, tmp_path: Path) -> None:
    """Over steps, minibatches and epochs, with prompts that are shared and given tokens between sampled ones.

    A fresh one without given tokens is that of the checkpoint below.
    """
    config = config_of(**CASES[case])
    data = batches(3 if config.max_staleness == 2 else 2, staleness=config.max_staleness, given=True)
    inside = trained(config, data)
    with apart(own(config), tmp_path) as at:
        assert_same(trained(own(config), data, at), inside)
    assert inside.metrics[-1]["critic_grad_norm"] > 0
    assert inside.metrics[-1]["value_clipped_frac"] > 0
    assert ("staleness_tokens/lag_2" in inside.metrics[-1]) == (config.max_staleness == 2)


def test_completions_without_a_token_to_train_on_have_no_values(tmp_path: Path) -> None:
    """Truncated ones are masked, but a penalty in the reward measures all of them: some of them have no target."""
    config, (groups,) = config_of(loss={"truncated": "mask"}), batches(1)
    cut = [msgspec.structs.replace(one.completion, finish_reason="length") for one in groups[1].rollouts]
    cut[0] = msgspec.structs.replace(cut[0], segments=())
    members = [msgspec.structs.replace(one, completion=new) for one, new in zip(groups[1].rollouts, cut, strict=True)]
    data = [[groups[0], Group(ordinal=1, rollouts=tuple(members)), *groups[2:]]]
    inside = trained(config, data)
    with apart(own(config), tmp_path) as at:
        assert_same(trained(own(config), data, at), inside)
    with apart(own(config), tmp_path) as at:
        nothing = TrainSequence.read_only((0, 0), np.arange(3), np.zeros(3, bool))
        at.link.ask_values([nothing], 0)
        assert at.link.values([nothing])[0, 0].shape == (0,)


def test_it_works_while_the_policy_is_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All updates of a step are sent before any answer to one is read."""
    config, data = own(config_of()), batches(1)
    with apart(config, tmp_path) as at:
        sent: list[str] = []

        def noted(name: str, call: Any) -> Any:
            return lambda *args: (sent.append(name), call(*args))[1]

        for name in ("train", "updated"):
            monkeypatch.setattr(at.link, name, noted(name, vars(CriticLink)[name].__get__(at.link)))
        trained(config, data, at)
    assert sent == ["train"] * 4 + ["updated"] * 4


def test_a_critic_that_does_not_answer_is_named_at_the_deadline(tmp_path: Path) -> None:
    config = own(config_of(deadline_s=0.2))
    ports = connect_local([*_of_critic(config)], is_threaded=True)
    ends = ports["trainer"]
    context = Context("trainer", tmp_path, ends.inputs, ends.outputs, NoSpans(), WallClock(), together=ends.together)
    link = CriticLink(context, config, data_ranks=RankGroup.alone(), peers=RankGroup.alone())
    with pytest.raises(ChannelTimeout, match=r"(?s)the critic has not answered .*values of step 0.*deadline_s = 0.2"):
        trained(config, batches(1), Apart(None, link, ports))  # type: ignore[arg-type]
    with pytest.raises(ChannelTimeout, match="update 0 of step 0"):
        link.updated(0)
    link.save(tmp_path / "checkpoints" / "step_1", 1)
    with pytest.raises(ChannelTimeout, match="its part of a checkpoint"):
        link.hear_of_part(wait=True)
    with pytest.raises(CheckpointError, match="lacks the critic's part"):
        link.part(tmp_path / "checkpoints" / "step_1", 0.0)


def test_a_refused_update_changes_nothing_of_the_critic_and_ends_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, data = config_of(), batches(2)
    with apart(own(config), tmp_path) as at:
        trained(own(config), data[:1], at)
        parameters, train = at.critic._critic.parameters.named_views(), at.link.train

        def with_infinite_returns(index: int, microbatches: Sequence[PackedMicrobatch]) -> None:
            train(index, [replace(one, returns=np.full_like(one.returns, np.inf)) for one in microbatches])

        monkeypatch.setattr(at.link, "train", with_infinite_returns)
        before = {name: view.clone() for name, view in parameters.items()}
        with pytest.raises(
            NonFiniteError, match=r"(?s)step 1, epoch 0, minibatch 0: the critic's .*value loss (inf|nan)"
        ):
            trained(own(config), data[1:], at, first=1)
        for name, view in parameters.items():
            torch.testing.assert_close(view, before[name], rtol=0, atol=0)


def saved(policy: Any, path: Path, at: Apart) -> None:
    """Save as a trainer of one rank does that has its critic elsewhere."""
    path.parent.mkdir(exist_ok=True)
    at.link.save(path, 1)
    at.link.hear_of_part(wait=True)
    with closing(Checkpoints()) as checkpoints:
        checkpoints.save(path, {"policy": policy}, step=1, part=at.link.part)


def test_a_checkpoint_is_the_one_that_the_trainer_alone_would_write(tmp_path: Path) -> None:
    """But for the file that each tensor lies in; a resume goes on to the bit, wherever the critic is then."""
    config, data = config_of(trainer=ONE_EPOCH), batches(2)
    whole = trained(config, data)
    paths = {kind: tmp_path / kind / "checkpoints" / "step_1" for kind in ("inside", "own")}
    for path in paths.values():
        path.parent.mkdir(parents=True)
    first = trained(config, data[:1])
    save_checkpoint(paths["inside"], first.trained["policy"], step=1, critic=first.trained["critic"])
    with apart(own(config), tmp_path / "own") as at:
        second = trained(own(config), data[:1], at)
        saved(second.trained["policy"], paths["own"], at)
    assert sorted(one.name for one in paths["own"].parent.iterdir()) == ["step_1"]
    assert {one.name for one in paths["own"].glob("rank_*")} == {f"rank_0000{n}.safetensors" for n in (0, 1)}
    verify_checkpoint(paths["own"])
    assert json.loads((paths["own"] / "state.json").read_text()) == json.loads(
        (paths["inside"] / "state.json").read_text()
    )
    for path in paths.values():
        inside = trained(config, data[1:], first=1, load=path)
        with apart(own(config), tmp_path / "own", resume=path) as at:
            there = trained(own(config), data[1:], at, first=1, load=path)
        for one in (inside, there):
            assert_same(replace(one, metrics=whole.metrics[:1] + one.metrics), whole)


def test_what_an_interrupted_save_left_is_no_part_of_the_next(tmp_path: Path) -> None:
    stale = tmp_path / "checkpoints" / ".critic" / "step_9"
    stale.mkdir(parents=True)
    with apart(own(config_of()), tmp_path):
        assert not stale.exists()


def test_it_starts_from_what_the_warm_start_has_made(tmp_path: Path) -> None:
    warm = {"steps": 3, "batch_size": 4, "num_demonstrations": 8}
    config = config_of(warm_start=warm)
    model, tokenizer = build_policy(config.model, seed=config.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    save_model(model, tmp_path / "start", tokenizer)
    inside = Critic(config, model)
    with apart(own(config), tmp_path) as at:
        assert "_critic" not in vars(at.critic), "nothing has been made yet"
        at.link.start(tmp_path / "start")
        at.link.ask_values([], 0)
        assert at.link.values([]) == {}
        for name, view in at.critic._critic.parameters.named_views().items():
            torch.testing.assert_close(view, inside.parameters.named_views()[name], rtol=0, atol=0)


def test_every_rank_of_the_trainer_gets_the_values_of_its_own_sequences(tmp_path: Path) -> None:
    """Two data-parallel ranks of two peers each; only rank 0 speaks with the critic."""
    config, (groups,) = own(config_of()), batches(1)
    sequences = [train_sequence(one.completion) for group in groups for one in group.rollouts]
    parts = [sequences[:5], sequences[5:]]
    with apart(config, tmp_path) as at:
        at.link.ask_values(sequences, 0)
        expected = at.link.values(sequences)

        def job(ranks: ThreadRanks) -> list[Columns]:
            data, peers = ranks.split(2)
            context = replace(at.context, group=ranks)
            link = CriticLink(context, config, data_ranks=data, peers=peers)
            link.ask_values(parts[data.rank], 1)
            values = link.values(parts[data.rank])
            shaped = [with_columns(one, values=values[one.key], returns=values[one.key]) for one in parts[data.rank]]
            link.train(0, collate.collate(shaped, 40))
            told = link.updated(0)
            return [values, {(told.step, told.index): np.array(told.grad_norm)}]

        found = results(on_ranks(4, job))
    for rank, (values, (told)) in enumerate(found):
        assert values.keys() == {one.key for one in parts[rank // 2]}
        for key, column in values.items():
            np.testing.assert_allclose(column, expected[key], atol=1e-6)
        assert told == {(1, 0): 0.0}, "values are where their returns are"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"critic": {"ranks": 2}}, "critic.ranks = 2 with critic.executor = 'trainer'"),
    ({"critic": {"device": "cuda"}}, "critic.executor = 'trainer'"),
    ({"critic": {"executor": "own", "model": "head"}}, "a head reads the policy's states"),
    ({"critic": {"executor": "own", "ranks": 3, "tensor_parallel": 2}}, "whole tensor-parallel groups"),
    ({"critic": {"executor": "own"}, "loss": {"advantages": "leave_one_out"}}, "there is no critic"),
    ({"critic": {"executor": "own"}, "host": "inline"}, "takes two processes"),
    (
        {"critic": {"executor": "own"}, "trainer": {"device": "cuda", "precision": "bfloat16"}},
        "trainer.precision = 'bfloat16' with critic.device = 'cpu'",
    ),
    (
        {"critic": {"executor": "own"}, "trainer": {"device": "cuda", "offload_moments": True}},
        "trainer.offload_moments = True with critic.device = 'cpu'",
    ),
]


@pytest.mark.parametrize(("changes", "match"), REFUSED)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        recipes.validate(recipes.merge(config_of().model_dump(), {"host": "process"} | changes))


def test_it_has_processes_and_threads_of_its_own() -> None:
    config = own(config_of())
    names = [node.name for node in default_pipeline(config).nodes]
    assert names[-2:] == ["critic", "trainer"]
    assert {"critic"} <= computing_groups(config)
    assert "critic" not in computing_groups(config_of())
    for staleness in (0, 2):
        threads = place(config.model_copy(update={"max_staleness": staleness}), 8)
        assert threads["critic"].together + threads["trainer"].together <= 8, "they work at the same time"
    check_remote(config, ["critic"])
    jobs = {job.kind for job in lay_out(config, ["critic"]).groups}
    assert jobs == {"trainer", "generator", "critic"}, "and so it has a job of its own, where that is asked for"
    with pytest.raises(ConfigError, match="no such group"):
        check_remote(config_of(), ["critic"])
