"""Signals that end a run: the first, the second, echoes, the grace period, and the handlers afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.core import interrupts as interrupts_module
from slipstream.core.interrupts import SIGNALS, Interrupted, Interrupts

FAR_S = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that moves the time that the module sees."""
    now = [FAR_S]
    monkeypatch.setattr(interrupts_module.time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_ends_the_program_where_there_is_nothing_to_finish(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=number.name) as ended, Interrupts():
        signal.raise_signal(number)
    assert isinstance(ended.value, KeyboardInterrupt)
    assert ended.value.number == number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_deferred_signal_is_noted_and_the_second_ends_the_program(
    number: signal.Signals, clock: Callable[[float], None]
) -> None:
    with Interrupts() as interrupts, interrupts.deferred(FAR_S):
        assert interrupts.number is None
        signal.raise_signal(number)
        assert interrupts.number == number
        clock(0.1)
        signal.raise_signal(number)  # `timeout` sends it to the process and to its group
        assert not interrupts.is_at_once
        clock(1.0)
        with pytest.raises(Interrupted):
            signal.raise_signal(number)
        assert interrupts.is_at_once
        signal.raise_signal(signal.SIGTERM)  # children are being killed
        clock(10.0)
        with pytest.raises(Interrupted, match=number.name):  # and do not end
            signal.raise_signal(signal.SIGINT)


def test_a_different_signal_is_no_echo() -> None:
    with Interrupts() as interrupts, interrupts.deferred(FAR_S):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted, match="SIGINT"):
            signal.raise_signal(signal.SIGTERM)


def test_the_end_of_the_grace_period_is_a_second_signal() -> None:
    """It interrupts every wait of the main thread."""
    before = signal.getsignal(signal.SIGALRM)
    with Interrupts() as interrupts, interrupts.deferred(0.01):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            threading.Event().wait(60)
    assert signal.getsignal(signal.SIGALRM) is before


def test_ctrl_c_has_no_grace_period() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with Interrupts() as interrupts, interrupts.deferred(0.01):
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGALRM) is before


def test_a_run_that_ends_in_time_gets_no_alarm_and_the_programs_own_timer_goes_on() -> None:
    handler, own = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 500.0)
    with Interrupts() as interrupts:
        with interrupts.deferred(FAR_S):
            signal.raise_signal(signal.SIGTERM)
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
        signal.setitimer(signal.ITIMER_REAL, *own)
        assert signal.getsignal(signal.SIGALRM) is handler
        with pytest.raises(Interrupted):
            interrupts.check()


def test_signals_that_the_program_ignores_stay_ignored() -> None:
    """`nohup` ignores SIGHUP. Ctrl-C is handled anyhow: shells ignore it for programs in the background."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            assert interrupts.number is None
            with pytest.raises(Interrupted):
                signal.raise_signal(signal.SIGINT)
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_are_not_handled_in_another_thread() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    found = []

    def run() -> None:
        with Interrupts() as interrupts, interrupts.deferred(FAR_S):
            found.append([signal.getsignal(number) for number in SIGNALS])
            interrupts.hand_on()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert found == [before]


def test_the_signal_is_handed_on_to_its_previous_handler() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        with Interrupts() as interrupts, interrupts.deferred(FAR_S):
            signal.raise_signal(signal.SIGTERM)
        assert not heard
        interrupts.hand_on()
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    with Interrupts() as interrupts, interrupts.deferred(FAR_S):
        signal.raise_signal(signal.SIGHUP)
    with pytest.raises(SystemExit) as left:
        interrupts.hand_on()
    assert left.value.code == 129
    with Interrupts() as interrupts, interrupts.deferred(FAR_S):
        signal.raise_signal(signal.SIGINT)
    interrupts.hand_on()  # Ctrl-C was for the run


def test_a_childs_own_children_can_be_ended() -> None:
    """The child outlives signals to all processes of a run; its own children end as usual."""
    program = (
        "import os, signal, subprocess, sys\n"
        "from slipstream.core.interrupts import leave_to_the_run\n"
        "leave_to_the_run()\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.raise_signal(number)\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "inner.terminate()\n"
        "sys.exit(0 if inner.wait(60) == -signal.SIGTERM else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_what_is_forked_from_a_process_that_leaves_signals_to_its_run_can_be_terminated() -> None:
    """At once, too, when the fork has hardly begun."""
    program = (
        "import os, signal\n"
        "from slipstream.core.interrupts import end_forked_as_usual, leave_to_the_run\n"
        "leave_to_the_run()\n"
        "end_forked_as_usual()\n"
        "for _ in range(50):\n"
        "    if (child := os.fork()) == 0:\n"
        "        signal.pause()\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


# While the program starts

SIGNALLED = """
import os, sys

class Signalling:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Signalling())
sys.argv[1:] = {arguments!r}
from slipstream.__main__ import script
script()
"""


@pytest.mark.parametrize(
    ("command", "module", "number"),
    [
        ("run quickstart", "slipstream.cli", signal.SIGINT),
        ("run quickstart", "tyro", signal.SIGTERM),
        ("run quickstart", "pydantic_core", signal.SIGHUP),
        pytest.param("run quickstart", "slipstream.api", signal.SIGINT, marks=pytest.mark.slow),
        ("run quickstart", "torch", signal.SIGINT),
        pytest.param("eval run", "slipstream.evals.target", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("report run", "slipstream.observe.report", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("watch run", "slipstream.observe.watch", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("plan llama-3.1-8b --gpus 16", "slipstream.plan.answer", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("simulate run", "slipstream.plan.what_if", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(
            "launch quickstart --group controller", "slipstream.launch", signal.SIGTERM, marks=pytest.mark.slow
        ),
    ],
)
def test_while_a_command_is_imported_a_signal_ends_it_with_one_line(
    command: str, module: str, number: signal.Signals, tmp_path: Path
) -> None:
    program = SIGNALLED.format(module=module, number=int(number), arguments=command.split())
    call = [sys.executable, "-c", program]
    ended = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    by = "" if number == signal.SIGINT else f" by {number.name}"
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("starting quickstart: ")]
    assert (ended.returncode, ended.stdout, lines) == (128 + number, "", [f"interrupted{by}"])
    assert not list(tmp_path.iterdir())


def test_an_interrupt_that_a_library_replaced_is_restored() -> None:
    """Modules written in C turn every exception into an ImportError."""

    def load() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as interrupt:
            raise ImportError("initialization failed") from interrupt

    with pytest.raises(Interrupted, match="SIGTERM"), Interrupts():
        load()
    with pytest.raises(ImportError), Interrupts():
        raise ImportError("of its own")
