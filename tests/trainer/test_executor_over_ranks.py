"""The trainer's executor on ranks that are threads: who keeps, tells, relays, trains and records what."""

from collections import deque
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
from covering import with_slow
from rank_threads import on_ranks, results
from test_over_ranks import PACKING, SummedAdamW, assert_same_metrics
from training_data import VOCAB_SIZE, make_groups, run_config

from slipstream.algorithms.losses import table as losses
from slipstream.batching import collate
from slipstream.batching.buffer import GroupBuffer
from slipstream.core.clock import WallClock
from slipstream.core.errors import SlipstreamError
from slipstream.core.executor import Context
from slipstream.core.peer_messages import Arrived
from slipstream.core.ranks import data_parallel_rank, rank_name
from slipstream.core.run_log import read_rollouts
from slipstream.core.service_messages import Progress, Published, Ready, Waiting, WarmStart
from slipstream.core.spans import NoSpans
from slipstream.core.types import GroupScored, Skip, StepDone, Stop, TrainStep
from slipstream.observe.tokens import read_tokens
from slipstream.trainer import executor
from slipstream.trainer.executor import Trainer
from slipstream.trainer.policy import Policy
from slipstream.trainer.scores import dealt_by

NUM_STEPS = 3


class Port:
    """Both ends of a channel; a BROADCAST one has several receivers."""

    def __init__(self, *others):
        self.messages, self.others = deque(), others

    def put(self, message):
        for port in self.others or [self]:
            port.messages.append(message)

    def get_nowait(self):
        return self.messages.popleft() if self.messages else None


class Spans(NoSpans):
    def set_idle_state(self, state):
        self.idle = state


class Offers:
    """A publisher that notes what is offered."""

    num_bytes = 1
    has_moved = True

    def __init__(self):
        self.offered = []

    def open(self, flat, packer=None, holding=None): ...

    def poll(self):
        return False

    def withdraw(self):
        return True

    def publish(self, version, probe_tokens, probe_logprobs):
        self.offered.append((version, probe_logprobs))
        return True


class SummedPolicy(Policy):
    """Whole on every rank; gradients are summed over data-parallel ones. Context-parallel ones all read everything."""

    def __init__(self, config, ranks, data_ranks, tensor_ranks, context_ranks, stage_ranks, expert_ranks):
        self.data_ranks, self.readers = data_ranks, context_ranks.world
        super().__init__(config)

    def new_optimizer(self, config, *, total_updates, updates_per_step=1):
        return SummedAdamW(self.parameters, config, total_updates=total_updates).over(self.data_ranks, self.readers)


def demonstrations():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, (2, 7)).astype(np.int32)
    tokens = rng.integers(0, VOCAB_SIZE, int(lengths.sum())).astype(np.int32)
    return WarmStart(tokens=tokens, prompt_lengths=lengths[0], completion_lengths=lengths[1])


def steps_of(config):
    """Four groups of each step, and before them one that will be skipped; some rollouts have failed."""
    for step in range(NUM_STEPS):
        groups = make_groups(config.groups_per_step + 1, config.samples_per_group, seed=step, version=step)
        renamed = []
        for place, group in enumerate(groups):
            rollouts = [
                msgspec.structs.replace(
                    rollout,
                    failure="timeout" if place == step and rollout.sample == 1 else None,
                    completion=msgspec.structs.replace(rollout.completion, ordinal=10 * step + place),
                )
                for rollout in group.rollouts
            ]
            renamed.append(msgspec.structs.replace(group, ordinal=10 * step + place, rollouts=tuple(rollouts)))
        yield renamed


def run(monkeypatch, run_dir, config, world, tensor_parallel=1, context_parallel=1):
    """[rank]: (the trainer, its events, its publisher) after all steps."""
    sizes = {"ranks": world, "tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=sizes)})
    peers = config.trainer.peers
    monkeypatch.setattr(executor, "Policy", SummedPolicy)
    commands, arrived = [Port() for _ in range(world)], Port()
    rollouts = [Port() for _ in range(world)]
    num_shares = world // peers
    steps = list(steps_of(config))

    def deal(groups, seed):
        everything = [rollout for group in groups for rollout in group.rollouts]
        everything += everything[:5]  # some come twice
        for index in np.random.default_rng(seed).permutation(len(everything)):
            one = everything[index]
            share = data_parallel_rank(one.ordinal, one.sample, num_shares, by=dealt_by(config.loss))
            rollouts[share * peers].put(one)

    def job(ranks):
        events, publisher = Port(), Offers()
        inputs, outputs = {"commands": commands[ranks.rank]}, {"events": events}
        if ranks.rank % peers == 0:
            inputs["rollouts"] = rollouts[ranks.rank]
            outputs["arrived"] = arrived
        if ranks.rank == 0:
            inputs["arrived"] = arrived
            outputs["relay"] = Port(*commands[1:])
        trainer = Trainer(
            config=config,
            new_buffer=lambda expects=None: GroupBuffer(config.samples_per_group, expects=expects),
            batching=collate,
        )
        name = rank_name("trainer", ranks.rank)
        trainer.init(Context(name, run_dir, inputs, outputs, Spans(), WallClock(), publisher=publisher, group=ranks))
        if ranks.rank == 0:
            control(trainer, events)
        while not trainer.is_finished:
            trainer.step()
        trainer.close()
        return trainer, list(events.messages), publisher

    def control(trainer, events):
        commands[0].put(demonstrations())
        while not any(isinstance(event, Ready) for event in events.messages):
            trainer.step()
        for step, groups in enumerate(steps):
            deal(groups, seed=step)
            wanted = {group.ordinal for group in groups}
            while wanted - {event.ordinal for event in events.messages if isinstance(event, GroupScored)}:
                trainer.step()
            skipped, *trained = sorted(wanted)
            commands[0].put(Waiting(reason="straggler"))
            commands[0].put(Skip(ordinals=(skipped,)))
            commands[0].put(TrainStep(step=step, ordinals=tuple(trained)))
            while not any(isinstance(event, StepDone) and event.step == step for event in events.messages):
                trainer.step()  # nothing is sampled from a version before there is one
        commands[0].put(Stop())

    return results(on_ranks(world, job))


LOSSES = {
    "samples": {"name": "grpo"},
    "groups": {"name": "grpo", "select": "best_and_worst"},
    "baseline": {"name": "reinforce", "advantages": "greedy_baseline"},
}


@pytest.mark.parametrize(
    ("loss", "world", "tensor_parallel", "context_parallel"),
    with_slow(
        [("groups", 3, 1, 1), ("samples", 2, 2, 1), ("samples", 4, 1, 2)],
        [("baseline", 2, 1, 1), ("samples", 2, 1, 1), ("groups", 2, 1, 1), ("samples", 4, 2, 1), ("samples", 8, 2, 2)],
    ),
)
def test_a_run_over_ranks_is_that_of_one(monkeypatch, tmp_path, loss, world, tensor_parallel, context_parallel):
    config = run_config(
        steps=NUM_STEPS, loss=LOSSES[loss], warm_start={"steps": 10, "batch_size": 3}, observe={"tokens_every": 3}
    )
    ((one, events, publisher),) = run(monkeypatch, tmp_path / "one", config, 1)
    by_rank = run(monkeypatch, tmp_path / "ranks", config, world, tensor_parallel, context_parallel)
    # rank 0 says what one rank would
    found = by_rank[0][1]

    def of(events, kind):
        return [event for event in events if isinstance(event, kind)]

    assert {event.ordinal: event for event in of(found, GroupScored)} == {
        event.ordinal: event for event in of(events, GroupScored)
    }
    assert [(e.done, e.total) for e in of(found, Progress)] == [(10, 10)]
    assert [event.version for event in of(found, Published)] == [0, 1, 2, 3]
    assert [(event.step, event.version) for event in of(found, StepDone)] == [(0, 1), (1, 2), (2, 3)]
    for mine, expected in zip(of(found, StepDone), of(events, StepDone), strict=True):
        assert_same_metrics(mine.metrics, expected.metrics, rel=2e-3, ignored=PACKING)
    # the others only that they are there
    for rank, (trainer, told, offers) in enumerate(by_rank):
        if rank:
            assert [type(event) for event in told] == [Ready]
        assert told[0].executor == rank_name("trainer", rank) or rank == 0
        assert trainer.version == NUM_STEPS
        assert trainer.context.spans.idle == "wait_straggler"
        difference = trainer.policy.parameters.flat - one.policy.parameters.flat
        assert difference.norm() < 1e-4 * one.policy.parameters.flat.norm()
        for (version, logprobs), (as_one, expected) in zip(offers.offered, publisher.offered, strict=True):
            assert version == as_one
            np.testing.assert_allclose(logprobs, expected, atol=1e-3)
    num_duplicates = [trainer.inbox.rollouts.num_duplicates for trainer, _, _ in by_rank]
    assert sum(num_duplicates) == one.inbox.rollouts.num_duplicates == 5 * NUM_STEPS
    peers = tensor_parallel * context_parallel
    assert all(count == 0 for rank, count in enumerate(num_duplicates) if rank % peers)
    # one file, with the lines of all ranks in the order of one
    assert sorted(path.name for path in (tmp_path / "ranks").glob("rollouts*")) == ["rollouts.jsonl"]
    lines = list(read_rollouts(tmp_path / "ranks" / "rollouts.jsonl"))
    assert lines == list(read_rollouts(tmp_path / "one" / "rollouts.jsonl"))
    assert {line.outcome for line in lines} == {"trained", "skipped", "failed"}
    # and single tokens of every third group that is trained
    tokens, expected = (list(read_tokens(tmp_path / name / "tokens.jsonl")) for name in ("ranks", "one"))
    trained = [(line.ordinal, line.sample) for line in lines if line.step is not None]
    assert [(line.ordinal, line.sample) for line in tokens] == [key for key in trained if key[0] % 3 == 0]
    assert any(line.advantages[0] for line in tokens)
    for mine, theirs in zip(tokens, expected, strict=True):
        assert mine.texts == theirs.texts
        for name in ("behaviour_logprobs", "policy_logprobs", "advantages"):
            columns = (np.array(getattr(line, name), dtype=float) for line in (mine, theirs))
            np.testing.assert_allclose(*columns, atol=2e-3)


def test_a_step_with_rollouts_that_are_not_here_is_an_error():
    buffer = GroupBuffer(3, expects=lambda ordinal, sample: (ordinal + sample) % 2 == 1)
    groups = make_groups(2)
    buffer.add(groups[0].rollouts[1])
    assert buffer.is_complete(0)
    buffer.add(groups[1].rollouts[0])
    with pytest.raises(SlipstreamError, match=r"1 \(1 rollouts\)"):
        buffer.take([0, 1])
    with pytest.raises(SlipstreamError, match="does not train it"):
        buffer.add(groups[0].rollouts[2])
    buffer.add(groups[1].rollouts[2])
    taken = buffer.take([0, 1])
    assert {ordinal: [one.sample for one in members] for ordinal, members in taken.items()} == {0: [1], 1: [0, 2]}


def test_the_loss_of_a_run_is_built_once_however_many_rollouts_come(monkeypatch, tmp_path):
    built = []
    monkeypatch.setattr(losses, "replace", lambda loss, **changes: built.append(changes) or replace(loss, **changes))
    loss = {"name": "grpo", "params": {"eps_low": 0.2137}}  # of no other test: what is built once is kept
    run(monkeypatch, tmp_path, run_config(steps=NUM_STEPS, loss=loss), 1)
    assert [one["params"]["eps_low"] for one in built if "eps_low" in one["params"]] == [0.2137]


def test_a_rank_is_asked_once_whether_it_is_dealt_a_rollout():
    asked = []
    buffer = GroupBuffer(64, expects=lambda *place: asked.append(place) is None)
    for rollout in make_groups(1, 64)[0].rollouts:
        buffer.add(rollout)
    assert asked == [(0, sample) for sample in range(64)]


def test_groups_of_which_a_rank_has_nothing_are_whole_there():
    buffer = GroupBuffer(3, expects=lambda ordinal, sample: ordinal % 2 == 0)
    assert buffer.is_complete(1)
    assert buffer.take([1]) == {1: ()}


def test_heads_are_told_in_one_message_for_all_that_has_come(monkeypatch, tmp_path):
    """As many messages as there are rollouts could fill the channel of a rank 0 that is busy, and block the rank."""
    config = run_config(steps=NUM_STEPS)
    monkeypatch.setattr(executor, "Policy", SummedPolicy)

    def job(ranks):
        rollouts, arrived = Port(), Port()
        inputs = {"commands": Port(), "rollouts": rollouts, "arrived": arrived}
        trainer = Trainer(config=config, new_buffer=partial(GroupBuffer, 3), batching=collate)
        outputs = {"events": Port(), "arrived": arrived, "relay": Port()}
        trainer.init(
            Context("trainer", tmp_path, inputs, outputs, Spans(), WallClock(), publisher=Offers(), group=ranks)
        )
        for group in make_groups(4):
            for one in group.rollouts:
                if (one.ordinal + one.sample) % 2 == ranks.rank:
                    rollouts.put(one)
        assert trainer.step()
        trainer.close()
        return list(arrived.messages)

    ours, others = results(on_ranks(2, job))
    assert ours == []
    (told,) = others
    assert isinstance(told, Arrived)
    assert {(head.ordinal + head.sample) % 2 for head in told.heads} == {1}
    assert len(told.heads) == 6


class Read(Offers):
    """Versions in place, of which the last is being read until `is_free`."""

    is_free = True

    def withdraw(self):
        return self.is_free


def test_a_step_waits_until_nobody_reads_the_weights_and_later_commands_wait_behind_it(tmp_path):
    config = run_config(steps=NUM_STEPS)
    commands, rollouts, events, publisher = Port(), Port(), Port(), Read()
    trainer = Trainer(config=config, new_buffer=partial(GroupBuffer, config.samples_per_group), batching=collate)
    inputs, outputs = {"commands": commands, "rollouts": rollouts}, {"events": events}
    trainer.init(Context("trainer", tmp_path, inputs, outputs, Spans(), WallClock(), publisher=publisher))
    groups = make_groups(config.groups_per_step, config.samples_per_group)
    for rollout in [rollout for group in groups for rollout in group.rollouts]:
        rollouts.put(rollout)
    trainer.step()
    publisher.is_free = False
    commands.put(TrainStep(step=0, ordinals=tuple(group.ordinal for group in groups)))
    commands.put(Stop())
    for _ in range(3):
        assert not trainer.step(), "it sleeps until the version's release wakes it"
    assert [version for version, _ in publisher.offered] == [0]
    publisher.is_free = True
    while not trainer.is_finished:
        assert trainer.step()
    assert [version for version, _ in publisher.offered] == [0, 1]
    assert sum(isinstance(event, StepDone) for event in events.messages) == 1
    trainer.close()


def test_a_reference_that_the_warm_start_makes_is_on_the_disk_before_anything_depends_on_it(monkeypatch, tmp_path):
    """Every resume reads it, as no checkpoint has its weights."""
    config = run_config(steps=NUM_STEPS, warm_start={"steps": 1, "batch_size": 3}, kl={"coef": 0.1})
    trainer = Trainer(config=config, new_buffer=partial(GroupBuffer, config.samples_per_group), batching=collate)
    commands, events = Port(), Port()
    inputs = {"commands": commands, "rollouts": Port()}
    trainer.init(Context("trainer", tmp_path, inputs, {"events": events}, Spans(), WallClock(), publisher=Offers()))
    synced = []
    monkeypatch.setattr(executor, "sync_files", lambda path: synced.append((path, len(events.messages))))
    commands.put(demonstrations())
    while not any(isinstance(event, Ready) for event in events.messages):
        trainer.step()
    trainer.close()
    assert synced == [(tmp_path / "reference", 0)]
    assert trainer.reference is not None
