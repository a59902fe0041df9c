"""What waited for its step at a checkpoint waits again after a resume, on whatever ranks there are then."""

import msgspec
import pytest
from rank_threads import on_ranks, results
from test_executor_over_ranks import Offers, Port, Spans, SummedPolicy, steps_of
from training_data import run_config

from slipstream.batching import collate
from slipstream.batching.buffer import GroupBuffer
from slipstream.core.clock import WallClock
from slipstream.core.executor import Context
from slipstream.core.ranks import data_parallel_rank, rank_name
from slipstream.core.service_messages import Checkpoint, Ready
from slipstream.core.types import GroupScored, Stop
from slipstream.trainer import executor
from slipstream.trainer.executor import Trainer
from slipstream.trainer.scores import dealt_by

CUT = "a1"


class SavedByOne(SummedPolicy):
    """Whole on every rank: the first one's checkpoint is everybody's."""

    def save(self, path, **more):
        if self.data_ranks.rank == 0:
            super().save(path, **more)


class Watched(Offers):
    """Notes how many events there were before a version was offered."""

    def __init__(self, events):
        super().__init__()
        self.events, self.told_before = events, []

    def publish(self, version, probe_tokens, probe_logprobs):
        self.told_before = list(self.events.messages)
        return super().publish(version, probe_tokens, probe_logprobs)


@pytest.fixture
def scored():
    """Three groups; their samples say by their reward whose they are."""
    config = run_config()
    return next(steps_of(config))[:3]


def trainers(monkeypatch, run_dir, world, *, resume=None, control, **more):
    """[rank]: (trainer, events, publisher), rank 0 `control`led."""
    config = run_config(trainer={"ranks": world}, **more)
    monkeypatch.setattr(executor, "Policy", SavedByOne)
    commands, arrived, rollouts = [Port() for _ in range(world)], Port(), [Port() for _ in range(world)]

    def job(ranks):
        events = Port()
        publisher = Watched(events)
        inputs, outputs = {"commands": commands[ranks.rank], "rollouts": rollouts[ranks.rank]}, {"events": events}
        outputs["arrived"] = arrived
        if ranks.rank == 0:
            inputs["arrived"] = arrived
            outputs["relay"] = Port(*commands[1:])
        trainer = Trainer(
            config=config,
            new_buffer=lambda expects=None: GroupBuffer(config.samples_per_group, expects=expects),
            batching=collate,
            resume=None if resume is None else str(resume),
        )
        name = rank_name("trainer", ranks.rank)
        trainer.init(Context(name, run_dir, inputs, outputs, Spans(), WallClock(), publisher=publisher, group=ranks))
        if ranks.rank == 0:
            control(trainer, events, commands[0], rollouts)
        while not trainer.is_finished:
            trainer.step()
        trainer.close()
        return trainer, list(events.messages), publisher

    return results(on_ranks(world, job))


def save(monkeypatch, run_dir, world, groups, dropped=()):
    """A checkpoint at which the first two groups are whole, and the third lacks a sample; the first is not owed."""
    config = run_config(trainer={"ranks": world})
    everything = [rollout for group in groups for rollout in group.rollouts][:-1]

    def control(trainer, events, commands, rollouts):
        for one in everything:
            rollouts[data_parallel_rank(one.ordinal, one.sample, world, by=dealt_by(config.loss))].put(one)
        while sum(isinstance(event, GroupScored) for event in events.messages) < 2:
            trainer.step()
        owed = [group.ordinal for group in groups[1:]]
        path = str(run_dir / "checkpoints" / "step_0")
        commands.put(
            Checkpoint(step=0, path=path, schedule={"readmit": owed, "dropped": list(dropped)}, num_events=0, cut=CUT)
        )
        commands.put(Stop())

    trainers(monkeypatch, run_dir, world, control=control)
    return run_dir / "checkpoints" / "step_0"


def later(group, by):
    """The same group, admitted so many ordinals later."""
    return msgspec.structs.replace(
        group,
        ordinal=group.ordinal + by,
        rollouts=tuple(
            msgspec.structs.replace(
                one, completion=msgspec.structs.replace(one.completion, ordinal=one.completion.ordinal + by)
            )
            for one in group.rollouts
        ),
    )


@pytest.mark.parametrize(
    ("policy", "all_before_are_dropped"), [("oldest_first", True), ("oldest_first", False), ("drop_stale", False)]
)
def test_what_could_become_too_stale_is_not_restored(monkeypatch, tmp_path, scored, policy, all_before_are_dropped):
    """It started after the cut, thanks to drops that the cut does not know: they may not be dropped again.

    `drop_stale` starts groups whatever their place, and discards by itself what is stale then.
    """
    shifted = [later(group, 1000) for group in scored]
    dropped = range(1000) if all_before_are_dropped else range(900)
    checkpoint = save(monkeypatch, tmp_path / "run", 1, shifted, dropped)

    def control(trainer, events, commands, rollouts):
        commands.put(Stop())

    by = {"policy": policy}
    [(_, events, _)] = trainers(monkeypatch, tmp_path / "again", 1, resume=checkpoint, control=control, schedule=by)
    told = [event.ordinal for event in events if isinstance(event, GroupScored)]
    assert told == ([shifted[1].ordinal] if all_before_are_dropped or policy == "drop_stale" else [])


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2), (2, 3)])
def test_groups_are_back_before_there_is_a_version_to_sample_from(monkeypatch, tmp_path, scored, before, after):
    checkpoint = save(monkeypatch, tmp_path / "run", before, scored)

    def control(trainer, events, commands, rollouts):
        commands.put(Stop())

    found = trainers(monkeypatch, tmp_path / "again", after, resume=checkpoint, control=control)
    _, events, publisher = found[0]
    assert [type(event) for event in publisher.told_before] == [Ready, GroupScored]
    told = [event for event in events if isinstance(event, GroupScored)]
    assert [event.ordinal for event in told] == [scored[1].ordinal], "the third is not whole, the first is not owed"
    back = sorted(
        (
            (rollout.sample, rollout.reward)
            for trainer, _, _ in found
            for rollout in trainer.inbox.rollouts.group(scored[1].ordinal)
        )
    )
    assert back == [(rollout.sample, rollout.reward) for rollout in scored[1].rollouts]
    rest = sum(len(trainer.inbox.rollouts.group(scored[2].ordinal)) for trainer, _, _ in found)
    assert rest == len(scored[2].rollouts) - 1, "what there is of it is a duplicate when it is sampled again"


def test_a_rank_whose_file_is_gone_leaves_its_groups_to_be_sampled_again(monkeypatch, tmp_path, scored):
    checkpoint = save(monkeypatch, tmp_path / "run", 2, scored)
    (checkpoint.with_name("step_0.rollouts") / "trainer@1.safetensors").write_bytes(b"torn")

    def control(trainer, events, commands, rollouts):
        commands.put(Stop())

    _, events, _ = trainers(monkeypatch, tmp_path / "again", 2, resume=checkpoint, control=control)[0]
    assert not [event for event in events if isinstance(event, GroupScored)]
