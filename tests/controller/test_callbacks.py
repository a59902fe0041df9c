"""Callbacks hear in order what has happened, in a thread; one that fails or hangs is an error with its name."""

from __future__ import annotations

import json
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.controller.callbacks import Callbacks
from slipstream.controller.evaluations import EvaluationDone
from slipstream.controller.observers import StepWritten
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.held_out import Measured
from slipstream.core.hooks import given_callbacks, load_callbacks
from slipstream.core.recipes import resolve
from slipstream.core.service_messages import CheckpointSaved


def stepped(step: int) -> StepWritten:
    return StepWritten({"step": step, "version": step + 1, "reward": 0.5})


def test_all_are_called_in_order_in_one_thread_and_cannot_change_what_others_get():
    heard: list[Any] = []

    class Listener:
        def on_step(self, record):
            heard.append(("step", record.step, record.metrics["reward"], threading.get_ident()))
            record.metrics["reward"] = 1.0

        def on_eval(self, record):
            heard.append(("eval", record.version, record.reward, threading.get_ident()))
            record.reward_parts["length"] = 1.0

    def on_checkpoint(record):
        heard.append(("checkpoint", record.step, record.path.name, threading.get_ident()))

    callbacks = Callbacks(given_callbacks([Listener(), {"on_checkpoint": on_checkpoint}, Listener()]))
    line, found = stepped(0), Measured(reward=0.25, reward_parts={"length": 0.75})
    callbacks.take(line)
    callbacks.take(EvaluationDone(1, 0.0, found, []))
    callbacks.take(CheckpointSaved(step=1, path="/run/checkpoints/step_1"))
    callbacks.finish()
    each = [("step", 0, 0.5), ("step", 0, 0.5), ("eval", 1, 0.25), ("eval", 1, 0.25), ("checkpoint", 1, "step_1")]
    assert [one[:3] for one in heard] == each
    assert (line.line, found.reward_parts) == (stepped(0).line, {"length": 0.75})
    assert len({one[3] for one in heard} - {threading.get_ident()}) == 1
    assert not callbacks.wants_stop
    assert len(callbacks.seconds) == 3


def test_records_can_be_written_and_sent():
    heard: list[Any] = []
    callbacks = Callbacks(given_callbacks({"on_step": heard.append, "on_eval": heard.append}))
    callbacks.take(stepped(0))
    callbacks.take(EvaluationDone(1, 0.0, Measured(reward=0.25, reward_parts={"length": 0.25}), []))
    callbacks.finish()
    step, found = (pickle.loads(pickle.dumps(record)) for record in heard)
    assert json.loads(json.dumps(step.metrics)) == {"step": 0, "version": 1, "reward": 0.5}
    assert json.loads(json.dumps(found.reward_parts)) == {"length": 0.25}


def test_one_that_raises_ends_the_calls_and_is_named():
    def failing(record):
        raise KeyError(record.step)

    heard = []
    callbacks = Callbacks(given_callbacks([{"on_step": failing}, {"on_step": heard.append}]))
    callbacks.take(stepped(7))
    with pytest.raises(SlipstreamError, match=r"on_step \(test_callbacks.py, line \d+\) raised[\s\S]*KeyError: 7"):
        callbacks.finish()
    assert heard == []
    assert callbacks.has_failed()
    assert not callbacks.has_failed(), "it is told once"


def test_stop_is_an_answer_and_anything_else_is_none():
    callbacks = Callbacks(given_callbacks({"on_step": lambda record: "stop" if record.step == 1 else None}))
    callbacks.take(stepped(0))
    callbacks.take(stepped(1))
    callbacks.finish()
    assert callbacks.wants_stop
    wrong = Callbacks(given_callbacks({"on_step": lambda _: True}))
    wrong.take(stepped(0))
    with pytest.raises(SlipstreamError, match=r"returned what means nothing[\s\S]*True"):
        wrong.finish()


def test_one_that_does_not_return_is_an_error_and_nobody_waits_longer():
    leave = threading.Event()
    callbacks = Callbacks(given_callbacks({"on_step": lambda _: leave.wait() and None}), timeout_s=0.05)
    callbacks.take(stepped(3))
    try:
        with pytest.raises(SlipstreamError, match=r"has not returned[\s\S]*step = 3"):
            callbacks.finish()
    finally:
        leave.set()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"on_steps": print}, "unknown name[\\s\\S]*on_step"),
        ([print], "no callback"),
        ({"on_step": 3}, "no callback"),
        (SimpleNamespace(on_train_begin=print), "no callback"),
        ({}, "no callback"),
    ],
)
def test_what_is_no_callback_is_refused(given, what):
    with pytest.raises(ConfigError, match=what):
        given_callbacks(given)


def test_functions_of_one_file_share_its_module_and_what_is_missing_is_told_before_a_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("seen = []\ndef a(record): seen.append(record)\ndef b(record): return 'stop' if seen else None\n")
    tables = {"callbacks": {"on_step": [f"{file}:a"], "on_eval": [f"{file}:b"]}}
    hooks = load_callbacks(resolve("quickstart", tables), {})
    hooks["on_step"][0]("record")
    assert hooks["on_eval"][0]("record") == "stop"
    import slipstream

    with pytest.raises(ConfigError, match=r"has no function 'c'[\s\S]*a, b"):
        slipstream.run("quickstart", overrides={"callbacks.on_step": [f"{file}:c"]}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
