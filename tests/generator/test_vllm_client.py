"""vLLM's client and worker over a make-believe vLLM: streams, versions, deaths, deadlines, and what is refused."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from covering import with_slow
from engine_kit import random_model
from fake_vllm import scripted
from vllm_kit import QUICK, drive, fake_engine, num_tokens, request, set_fake, set_weights

from slipstream.core.errors import ChannelError, ChannelTimeout, ConfigError, ExecutorDied, WeightSyncError
from slipstream.core.types import VersionSpan
from slipstream.generator.requests import Finished, Request
from slipstream.generator.vllm import protocol
from slipstream.generator.vllm.engine import Deadlines
from slipstream.generator.vllm.live import LiveCompletion
from slipstream.models.transformer import Transformer

LADDER = pytest.mark.parametrize(
    "fake",
    with_slow([{"kind": "keep", "labels": False}, {"kind": "bare"}], [{"kind": "keep"}, {"kind": "pause"}]),
    ids=["keep-unlabelled", "bare", "keep", "pause"],
)


@pytest.fixture
def model() -> Transformer:
    model = random_model()
    set_weights(model, 1.0)
    return model


def check(item: Finished, *, num_new: int, weights: dict[int, float] | None = None) -> None:
    """Tokens are the script's without a gap, and every one carries the version whose weights its logprob shows."""
    start = len(item.request.prompt_tokens)
    assert item.tokens.tolist() == [scripted(start + i) for i in range(num_new)]
    ends = [*(span.start for span in item.version_spans[1:]), num_new]
    for span, end in zip(item.version_spans, ends, strict=True):
        expected = -(weights or {0: 1.0})[span.version]
        np.testing.assert_array_equal(item.logprobs[span.start : end], expected)
        assert end > span.start


def test_completions_stream_back_in_rooms_of_their_streams(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path) as engine:
        engine.submit([request(i, num_prompt=1 + i, max_new_tokens=4 + i) for i in range(6)])
        engine.submit([request(i, stream=1, max_new_tokens=5) for i in range(3)])
        assert engine.num_live == 0, "nothing is sent before vLLM serves"
        engine.wait_ready()
        assert engine.num_live == 4 + 2
        assert engine.num_waiting == 2 + 1
        finished = drive(engine)
    assert sorted((f.request.stream, f.ordinal) for f in finished) == [
        *((0, i) for i in range(6)),
        *((1, i) for i in range(3)),
    ]
    for item in finished:
        check(item, num_new=item.request.max_new_tokens)
        assert item.finish_reason == "length"
        assert item.finished_s >= item.started_s


def test_a_stop_token_is_the_last(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, stop_token_ids=[scripted(3 + 6)]) as engine:
        engine.submit([request()])
        (item,) = drive(engine)
    assert (len(item.tokens), item.finish_reason) == (7, "stop")


@LADDER
def test_every_token_carries_the_version_it_was_sampled_under(
    model: Transformer, tmp_path: Path, fake: dict[str, object]
) -> None:
    with fake_engine(model, tmp_path, fake=fake | {"halts": [20, 20]}) as engine:
        engine.submit([request(i) for i in range(6)])
        for version in (1, 2):
            drive(engine, lambda least=num_tokens(engine) + 5: num_tokens(engine) >= least)
            set_weights(model, 1.0 + version)
            engine.push()
            engine.set_version(version)
        finished = drive(engine)
    assert len(finished) == 6
    for item in finished:
        check(item, num_new=50, weights={0: 1.0, 1: 2.0, 2: 3.0})
    assert [span.version for span in finished[0].version_spans] == [0, 1, 2]
    assert [span.version for span in finished[-1].version_spans] == [2], "it waited for room until after both"


def test_what_vllm_says_of_versions_decides(model: Transformer, tmp_path: Path) -> None:
    """Tokens that are read long after the weights have changed still are of the weights they were sampled under."""
    with fake_engine(model, tmp_path, fake={"slow_outputs": True, "halts": [20]}) as engine:
        engine.submit([request()])
        drive(engine, lambda: num_tokens(engine) >= 2)
        set_weights(model, 2.0)
        engine.push()
        engine.set_version(1)
        (item,) = drive(engine)
    check(item, num_new=50, weights={0: 1.0, 1: 2.0})
    assert [span.version for span in item.version_spans] == [0, 1]


def test_tokens_between_a_push_and_its_version_are_held_back(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"halts": [20]}) as engine:
        engine.submit([request()])
        drive(engine, lambda: num_tokens(engine) >= 5)
        set_weights(model, 2.0)
        engine.push()
        np.testing.assert_array_equal(engine.probe(np.arange(4, dtype=np.int32)), [-2.0] * 3)
        engine.set_version(7)
        (item,) = drive(engine)
    check(item, num_new=50, weights={0: 1.0, 7: 2.0})


def test_a_push_that_was_refused_is_taken_back(model: Transformer, tmp_path: Path) -> None:
    """What the refused weights sampled is sampled again under the old ones."""
    with fake_engine(model, tmp_path, fake={"halts": [20, 20]}) as engine:
        engine.submit([request(i) for i in range(2)])
        drive(engine, lambda: num_tokens(engine) >= 5)
        set_weights(model, 9.0)
        engine.push()
        engine.probe(np.arange(30, dtype=np.int32))
        set_weights(model, 1.0)
        engine.push()
        engine.set_version(0)
        finished = drive(engine)
    assert len(finished) == 2
    for item in finished:
        check(item, num_new=50)


@pytest.mark.parametrize("fake", with_slow([{"found": "all but the last"}], [{}]), ids=["cached", ""])
def test_exported_completions_go_on_where_they_were(
    model: Transformer, tmp_path: Path, fake: dict[str, object]
) -> None:
    """Also where vLLM finds more of a resumed completion in its cache than the prompt."""
    with fake_engine(model, tmp_path, fake=fake | {"halts": [20]}) as engine:
        engine.submit([request(i) for i in range(5)])
        drive(engine, lambda: num_tokens(engine) >= 5)
        engine.pause_admission(True)
        exported = engine.export_live()
        assert [r.ordinal for r in exported] == [0, 1, 2, 3]
        assert all(r.resume is not None and len(r.resume.tokens) >= 5 for r in exported)
        assert (engine.num_live, engine.num_waiting) == (0, 1)
        set_weights(model, 2.0)
        engine.push()
        engine.set_version(1)
        assert engine.num_begun == 0
        engine.submit(exported[:2])
        assert (engine.num_live, engine.num_begun, engine.num_waiting) == (2, 2, 1), "a pause is for what is new"
        engine.submit(exported[2:])
        engine.pause_admission(False)
        assert {live.request.ordinal for live in engine._live.values()} == {0, 1, 2, 3}, "resumed ones go first"
        finished = drive(engine)
    assert len(finished) == 5
    for item in finished:
        check(item, num_new=50, weights={0: 1.0, 1: 2.0})
        assert len(item.version_spans) == (1 if item.ordinal == 4 else 2)


def test_what_has_begun_and_waits_for_a_room_is_told(model: Transformer, tmp_path: Path) -> None:
    begun = [resumed(request(i), 0) for i in range(4)]
    with fake_engine(model, tmp_path, rooms={0: 1, 1: 1}) as engine:
        engine.submit(begun)
        assert [one.ordinal for one in engine.begun()] == [0, 1, 2, 3]
        assert engine.num_begun == 4
        assert [item.ordinal for item in drive(engine)] == [0, 1, 2, 3]


def test_an_answer_is_a_sign_of_life(model: Transformer, tmp_path: Path) -> None:
    """An update may take longer than a token may."""
    with fake_engine(model, tmp_path, fake={"halts": [5]}) as engine:
        engine.submit([request()])
        drive(engine, lambda: num_tokens(engine) >= 5)
        heard_s = engine._heard_s
        engine.push()
        assert engine._heard_s > heard_s


def test_out_of_time_ends_a_completion_as_it_is(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"stuck_after": 6}, max_len=200) as engine:
        engine.submit([request(0, time_limit_s=0.3), request(1, stream=1, max_new_tokens=3)])
        finished = drive(engine)
    late = next(item for item in finished if item.ordinal == 0)
    assert late.finish_reason == "deadline"
    check(late, num_new=3)


@pytest.mark.parametrize("fake", with_slow([{"kind": "bare"}], [{"kind": "keep"}]), ids=["bare", "keep"])
def test_a_killed_process_is_replaced_with_the_present_weights(
    model: Transformer, tmp_path: Path, fake: dict[str, object]
) -> None:
    """The weights of the last push, not of the start; what was in flight goes on from its last token."""
    with fake_engine(model, tmp_path, fake=fake | {"halts": [20, 20]}, max_restarts=1) as engine:
        engine.submit([request(i) for i in range(6)])
        drive(engine, lambda: num_tokens(engine) >= 5)
        set_weights(model, 2.0)
        engine.push()
        engine.probe(np.arange(8, dtype=np.int32))
        engine.set_version(1)
        before = num_tokens(engine)
        drive(engine, lambda: num_tokens(engine) >= before + 5)
        first = engine.pid
        set_fake(engine, {})
        os.kill(first, signal.SIGKILL)
        finished = drive(engine)
        assert engine.pid != first
        assert engine.num_restarts == 1
    assert len(finished) == 6
    for item in finished:
        check(item, num_new=50, weights={0: 1.0, 1: 2.0})


def test_signals_to_all_processes_of_a_run_do_not_end_it(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path) as engine:
        engine.wait_ready()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(engine.pid, number)
        engine.submit([request()])
        check(drive(engine)[0], num_new=50)


def test_a_death_in_the_middle_of_an_update_ends_with_the_new_weights(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"dies_in_update": True, "halts": [20]}, max_restarts=1) as engine:
        engine.submit([request()])
        drive(engine, lambda: num_tokens(engine) >= 5)
        set_weights(model, 2.0)
        set_fake(engine, {})
        engine.push()
        engine.set_version(1)
        (item,) = drive(engine)
        assert engine.num_restarts == 1
    check(item, num_new=50, weights={0: 1.0, 1: 2.0})
    assert len(item.version_spans) == 2


def test_a_dead_engine_behind_a_living_worker_is_noticed(model: Transformer, tmp_path: Path) -> None:
    """vLLM leaves those waiting who wait for tokens when the process of its engine is killed."""
    with fake_engine(model, tmp_path, fake={"core_dies_after_update": True, "halts": [20]}) as engine:
        engine.submit([request()])
        drive(engine, lambda: num_tokens(engine) >= 5)
        engine.push()
        engine.set_version(1)
        with pytest.raises(ExecutorDied, match=r"the vLLM process(.|\n)*the process of vLLM's engine ended"):
            drive(engine)


def test_one_death_too_many_names_the_process_and_shows_its_log(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"halts": [20]}) as engine:
        engine.submit([request()])
        drive(engine, lambda: num_tokens(engine) >= 2)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(ExecutorDied, match=rf"the vLLM process \(pid {engine.pid}\) ended") as caught:
            drive(engine)
    assert "killed by SIGKILL" in str(caught.value)
    assert str(tmp_path / "vllm.log") in str(caught.value)


@pytest.mark.parametrize(
    "fake", with_slow([{"halts": [20]}], [{"dies_in_update": True, "halts": [20]}]), ids=["fake1", "fake0"]
)
def test_once_lost_everything_that_is_asked_names_what_ended_it(
    model: Transformer, tmp_path: Path, fake: dict[str, object]
) -> None:
    """A swap that fails is undone, which asks a process that is gone for the weights before: the first error stands."""
    with fake_engine(model, tmp_path, fake=fake) as engine:
        engine.wait_ready()
        if "dies_in_update" not in fake:
            os.kill(engine.pid, signal.SIGKILL)
        first = rf"the vLLM process \(pid {engine.pid}\) ended"
        for ask in (engine.push, lambda: engine.probe(np.arange(8, dtype=np.int32)), engine.push):
            with pytest.raises(ExecutorDied, match=first):
                ask()


def test_a_replacement_that_computes_something_else_is_refused(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"halts": [20]}, max_restarts=1) as engine:
        engine.submit([request()])
        engine.wait_ready()
        engine.probe(np.arange(8, dtype=np.int32))
        set_fake(engine, {"probe_factor": 1.1})
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(WeightSyncError, match="restarted vLLM computes other logprobs"):
            drive(engine)


def test_what_failed_in_the_worker_is_told(model: Transformer, tmp_path: Path) -> None:
    """A failed start is not tried again."""
    with (
        fake_engine(model, tmp_path, fake={"cannot_start": True}, max_restarts=3) as engine,
        pytest.raises(ExecutorDied, match="starting vLLM: RuntimeError: no memory for the cache"),
    ):
        engine.wait_ready()
    assert engine.num_restarts == 0


@pytest.mark.parametrize(
    ("fake", "deadlines", "waited_for"),
    [
        ({"stuck_after": 3}, Deadlines(20.0, 10.0, 0.3), "a token"),
        ({"hangs_in_update": True, "halts": [20]}, Deadlines(20.0, 0.3, 10.0), r"weights to be loaded \(push 1\)"),
        ({"never_starts": True}, Deadlines(0.5, 10.0, 10.0), "vLLM to start"),
    ],
    ids=["tokens", "update", "start"],
)
def test_a_silent_process_meets_its_deadline(
    model: Transformer, tmp_path: Path, fake: dict[str, object], deadlines: Deadlines, waited_for: str
) -> None:
    with fake_engine(model, tmp_path, fake=fake, deadlines=deadlines) as engine:
        engine.submit([request()])
        is_pushed = "hangs_in_update" in fake
        if is_pushed:
            drive(engine, lambda: num_tokens(engine) >= 2)
        with pytest.raises(ChannelTimeout, match=rf"the vLLM process(.|\n)*waiting for {waited_for}"):
            engine.push() if is_pushed else drive(engine)


def test_a_stuck_process_is_replaced_and_killed(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"stuck_after": 30}, max_restarts=1) as engine:
        engine.submit([request()])
        drive(engine, lambda: num_tokens(engine) >= 30)
        first = engine.pid
        engine._deadlines = Deadlines(20.0, 10.0, 0.3)
        drive(engine, lambda: engine.num_restarts == 1)
        engine._deadlines = QUICK
        (item,) = drive(engine)
        assert engine.num_restarts == 1
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
    check(item, num_new=50)


@pytest.mark.parametrize(
    ("fake", "match"),
    [({"talks_nonsense": True}, "malformed message"), ({"bad_token": True}, "make no sense")],
    ids=["frame", "token"],
)
def test_malformed_messages_are_refused(
    model: Transformer, tmp_path: Path, fake: dict[str, object], match: str
) -> None:
    with fake_engine(model, tmp_path, fake=fake) as engine:
        engine.submit([request()])
        with pytest.raises(ChannelError, match=match):
            drive(engine)


def test_an_answer_to_something_else_is_refused(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"answers_others": True}) as engine:
        with pytest.raises(ChannelError, match="answered for other weights"):
            engine.push()
        with pytest.raises(ChannelError, match="answered another probe"):
            engine.probe(np.arange(8, dtype=np.int32))


def test_an_answer_that_comes_too_late_is_no_fault_of_the_replacement(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, max_restarts=1) as engine:
        engine.submit([request()])
        drive(engine, lambda: num_tokens(engine) >= 2)
        engine._worker.send(protocol.Probe(id=1 << 20, tokens=list(range(8))))
        late = engine._worker.wait_for(protocol.Probed, "the logprobs of the probe text", QUICK.answer_s)
        engine._worker._kept.append(late)  # as if it had come a moment after the deadline
        engine._replace(ChannelTimeout("no answer"))
        (item,) = drive(engine)
        assert engine.num_restarts == 1
    check(item, num_new=50)


def test_late_tokens_of_one_completion_are_not_the_next_ones(model: Transformer, tmp_path: Path) -> None:
    """In one room, completions out of time follow each other while the last tokens of the one before arrive."""
    with fake_engine(model, tmp_path, rooms={0: 1}) as engine:
        engine.submit([request(i, num_prompt=3 + i, max_new_tokens=70, time_limit_s=0.03) for i in range(10)])
        finished = drive(engine)
    assert len(finished) == 10
    for item in finished:
        check(item, num_new=len(item.tokens))


def test_what_vllm_cannot_do_is_refused(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path) as engine:
        with pytest.raises(ConfigError, match="do not fit"):
            engine.submit([request(max_new_tokens=1000)])
        with pytest.raises(ConfigError, match="another treatment of its cache"):
            engine.set_version(1, kv_on_update="recompute")


def test_the_end_leaves_nothing_behind(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path) as engine:
        engine.wait_ready()
        pid, folder = engine.pid, engine._folder.path
        sockets = engine._worker._folder
        assert folder.exists()
        assert sockets.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not folder.exists()
    assert not sockets.exists()
    engine.close()


def test_vllms_own_processes_end_with_the_worker(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"has_child": True}) as engine:
        engine.wait_ready()
        pid = engine.pid
        (child,) = (int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s and is_running(child):
        time.sleep(0.01)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_worker_outlives_its_parent(model: Transformer, tmp_path: Path) -> None:
    """Its standard input closes when the parent is killed: it ends, and removes the weights."""
    with fake_engine(model, tmp_path) as engine:
        engine.wait_ready()
        process = engine._worker._process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == -signal.SIGKILL
        assert not engine._folder.path.exists()
        assert not engine._worker._folder.exists(), "of the socket"


def resumed(base: Request, engine_version: int) -> Request:
    from slipstream.generator.requests import Resume

    return base.resumed_with(
        Resume(
            tokens=np.array([scripted(3), scripted(4)], dtype=np.int32),
            logprobs=np.array([-1.0, -1.0], dtype=np.float32),
            version_spans=(VersionSpan(start=0, version=engine_version),),
            started_s=0.0,
        )
    )


def test_noise_is_never_drawn_twice(model: Transformer, tmp_path: Path) -> None:
    """Every submission has a seed of its own: by run, stream, ordinal, sample, branch, turn and place."""
    with fake_engine(model, tmp_path, deadlines=QUICK) as engine:
        variants = [
            request(0),
            request(1),
            request(0, sample=1),
            request(0, stream=1),
            resumed(request(0), 0),
            replace(request(0, num_prompt=9), num_before=6),
            resumed(replace(request(0, num_prompt=9), num_before=6), 0),
            request(0, branch=1),
            replace(request(0, num_prompt=9, branch=1), num_before=6),
        ]
        seeds = [engine._job(LiveCompletion.of(variant, 0.0, 0)).seed for variant in variants]
        again = [engine._job(LiveCompletion.of(variant, 0.0, 0)).seed for variant in variants]
    assert seeds == again, "a function of the request alone"
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
