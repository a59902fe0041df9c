import io
import re
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
from rich.console import Console
from synthetic_run import make_summary

from slipstream.core.clock import VirtualClock
from slipstream.core.config import RunConfig
from slipstream.core.held_out import Measured
from slipstream.core.recipes import resolve
from slipstream.core.sections import PromptsConfig, TaskConfig
from slipstream.observe.display import MAX_PARTS, Display, config_summary, duration, printable, sparkline
from slipstream.observe.samples import Sample
from slipstream.observe.summary import Best, Evaluation, Evaluations
from slipstream.observe.transcript import TranscriptPart

CONFIG = RunConfig(recipe="quickstart", prompts=PromptsConfig(tasks=[TaskConfig(name="spell_backward")]))


def make_display(*, is_terminal: bool, steps: int = 100) -> tuple[Display, VirtualClock, io.StringIO]:
    out, clock = io.StringIO(), VirtualClock()
    console = Console(
        file=out,
        force_terminal=is_terminal,
        color_system="truecolor" if is_terminal else None,
        width=120,
        force_jupyter=False,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )
    return Display(config_summary(CONFIG), steps=steps, max_staleness=2, console=console, clock=clock), clock, out


def play(display: Display, clock: VirtualClock, steps: int = 100, step_s: float = 0.5) -> None:
    display.phase("warm start", 250, 250, {"loss": 0.25})
    display.evaluation("before", Measured(reward=0.5, accuracy=0.412))
    for step in range(steps):
        clock.advance(step_s)
        now_s = clock.now_s()
        display.counters("generator-0", {"time/decode": 0.8 * now_s, "generated_tokens": 1.0})
        display.counters("trainer", {"time/forward_backward": 0.6 * now_s, "time/wait_generation": 0.34 * now_s})
        display.swapped(0, step)
        display.step(
            {"step": step, "version": step + 1, "reward": step / steps, "staleness_mean": 0.8, "staleness_max": 2.0}
            | {"generated_tokens_per_s": 5210.0, "trained_tokens_per_s": 4890.0}
        )


def test_processes_that_are_ready_are_told_with_their_seconds_the_first_of_many():
    display, clock, out = make_display(is_terminal=False)
    for replica in range(20):
        clock.advance(0.5)
        display.ready(f"generator-{replica}")
    lines = [line for line in out.getvalue().splitlines() if "ready" in line]
    assert lines[0] == "generator-0: ready after 0.5 s"
    assert len(lines) == 8


def test_the_rate_of_training_is_over_the_last_steps_as_that_of_sampling():
    display, clock, out = make_display(is_terminal=False, steps=3)
    for step, tokens in enumerate((1000, 3000, 2000)):
        clock.advance(2.5)
        rates = {"trained_tokens_per_s": tokens / 1.0, "generated_tokens_per_s": 1500.0}
        display.step({"step": step, "version": step + 1, "tokens_trained": tokens, "step_s": 1.0} | rates)
    trained = re.findall(r"trained ([\d,]+) tokens/s", out.getvalue())
    assert trained == ["1,000", "2,000", "2,000"]


def test_plain_output_is_a_line_now_and_then_without_escape_codes():
    display, clock, out = make_display(is_terminal=False)
    play(display, clock)
    display.samples([Sample(prompt="abc>", answer="cba", before="abc", after="\x1b[31mcba\n")])
    display.finish(
        make_summary(model_share=0.625, model_cpu_share=0.5),
        {"report": Path("runs/q/report.html"), "model": Path("runs/q/model")},
    )
    text = out.getvalue()
    assert "\x1b" not in text
    assert r"\x1b[31mcba\n" in text
    lines = text.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert 25 <= len(steps) <= 30  # 50 s at a line every 2 s, the first and the last
    assert "reward 0.990" in steps[-1]
    assert "model: 62% of the working time of all processes, 50% of their CPU time" in lines
    assert lines[-1] == "next: slipstream eval runs/q   slipstream serve runs/q   slipstream export runs/q FOLDER"
    assert "trainer waits for generation 34%" in steps[-1]
    assert "left" in steps[1]
    assert "warm start 250/250  loss 0.25" in lines
    verdict = lines.index("Generation is the bottleneck: the trainer idles 32% of the time, generators 17%.")
    assert lines[verdict - 1] == "while steps were trained, without start and end:"
    assert "held-out accuracy before: 0.412  reward 0.500" in lines
    assert "held-out accuracy 0.412" in steps[-1]
    assert any("accuracy, greedy" in line and "0.412" in line and "0.934" in line for line in lines)
    assert not any("reward, greedy" in line for line in lines)  # a summary from before there was one
    assert any(line.startswith("report") and "runs/q/report.html" in line for line in lines)


def test_a_run_without_a_verdict_has_no_heading_for_one():
    display, _, out = make_display(is_terminal=False)
    summary = make_summary()
    assert summary.balance is not None
    display.finish(msgspec.structs.replace(summary, balance=msgspec.structs.replace(summary.balance, verdict="")), {})
    assert "while steps were trained" not in out.getvalue()


def test_episodes_are_shown_as_who_said_what_and_steer_nothing():
    display, _, out = make_display(is_terminal=False)
    turns = [
        TranscriptPart("assistant", "\x1b[31madd", 1, 0.5),
        TranscriptPart("call", "add(a=1)"),
        TranscriptPart("tool \x1b]0;x\x07", "2\n3"),
        *(TranscriptPart("user", f"more {i}") for i in range(MAX_PARTS)),
    ]
    fork = [TranscriptPart("fork 1 of 1", "a context of its own", fork=1), TranscriptPart("assistant", "\x07aside", 2)]
    display.samples([Sample(prompt="1+1", answer="2", before="c", after="whole text", after_turns=turns)])
    text = out.getvalue()
    assert "whole text" not in text
    assert not {"\x1b", "\x07"} & set(text)
    for said in (r"assistant (0.5): \x1b[31madd", "call: add(a=1)", "more 8", "...: 3 more"):
        assert said in text
    assert "more 9" not in text
    display.samples([Sample(prompt="1+1", answer="2", before="c", after="c", after_turns=[*turns[:3], *fork])])
    assert "fork 1 of 1: a context of its own" in out.getvalue()
    assert r"assistant: \x07aside" in out.getvalue()


def held_out(reward: float, **parts: float) -> Evaluation:
    return Evaluation.of(Measured(reward, parts), Measured(reward / 2, parts), 20)


def test_without_a_measure_the_held_out_mean_reward_is_the_headline():
    display, clock, out = make_display(is_terminal=False)
    before, after = held_out(-0.75, format=0.25, brevity=-1.0), held_out(-0.125, format=1.0, brevity=-1.125)
    display.evaluation("before", before.greedy)
    clock.advance(10.0)
    display.step({"step": 0, "version": 1, "reward": -0.5})
    display.finish(make_summary(eval=Evaluations(before=before, after=after)), {})
    text = out.getvalue()
    assert "held-out reward before: -0.750 (format 0.250, brevity -1.000)" in text
    assert "held-out reward -0.750" in next(line for line in text.splitlines() if line.startswith("step "))
    rows = {(cells := line.split("│"))[0].strip(): [cell.strip() for cell in cells[1:]] for line in text.splitlines()}
    assert rows["reward, greedy"] == ["-0.750", "-0.125"]
    assert rows["format, greedy"] == ["0.250", "1.000"]
    assert rows["brevity, sampled"] == ["-1.000", "-1.125"]
    assert rows["reward, sampled"] == ["-0.375", "-0.062"]
    assert "accuracy" not in text


def test_the_live_picture_says_what_was_held_out_and_how_it_began():
    display, clock, out = make_display(is_terminal=True)
    clock.advance(1.0)
    for label, reward in (("before", -0.75), ("at step 20", -0.5)):
        display.evaluation(label, held_out(reward).greedy)
    display.step({"step": 20, "version": 21, "reward": -0.5})
    display.close()
    assert "-0.500  reward, at step 20   was -0.750 before" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())


def test_the_live_picture_is_drawn_a_few_times_a_second_at_most():
    display, clock, out = make_display(is_terminal=True, steps=10_000)
    display.phase("warm start", 0, 250)
    drawn = []
    picture = display._picture
    display._picture = lambda: drawn.append(clock.now_s()) or picture()  # type: ignore[method-assign]
    play(display, clock, steps=10_000, step_s=0.001)
    assert len(drawn) <= 4 * 10 + 1
    display.finish(make_summary(), {})
    assert "waits for generation 34%" in out.getvalue()
    assert out.getvalue().rstrip().endswith("generators 17%.")  # the picture ended before the table


def test_an_interrupted_display_gives_the_terminal_back():
    display, clock, out = make_display(is_terminal=True)
    with suppress(KeyboardInterrupt), display:
        clock.advance(1.0)
        display.phase("warm start", 1, 10)
        raise KeyboardInterrupt
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_shares_are_those_of_the_recent_window():
    display, clock, _ = make_display(is_terminal=False)
    for second in range(100):
        clock.advance(1.0)
        display.counters(
            "trainer", {"time/forward_backward": min(second, 50), "time/wait_rewards": max(0, second - 50)}
        )
    assert display.waits()["trainer"] == [("wait_rewards", 1.0)]


def test_after_a_restart_shares_are_those_of_the_new_process():
    display, clock, _ = make_display(is_terminal=False)
    for totals in (
        {"decode": 60.0, "swap": 4.0},
        {"decode": 61.0, "swap": 4.0},
        {"load": 1.0},
        {"load": 1.0, "decode": 3.0},
    ):
        clock.advance(4.0)
        display.counters("generator-0", {f"time/{state}": seconds for state, seconds in totals.items()})
    assert display.waits()["generator-0"] == [("decode", 0.75), ("unlabelled", 0.25)]


def test_a_replica_that_is_lost_has_no_row_and_no_version():
    display, clock, _ = make_display(is_terminal=False)
    for second in range(2):
        clock.advance(1.0)
        for name in ("generator-1", "generator-1@1", "generator-10", "trainer"):
            display.counters(name, {"time/decode": float(second)})
    for replica in (1, 10):
        display.swapped(replica, 3)
    display.lost(1)
    assert list(display.waits()) == ["generator-10", "trainer"]
    assert display._replicas == {10: 3}


def test_commands_of_the_last_lines_can_be_copied_whatever_the_folder_is_called():
    display, _, out = make_display(is_terminal=False)
    display.finish(make_summary(), {name: Path("/runs/a run") / name for name in ("model", "tensorboard")})
    assert "tensorboard --logdir '/runs/a run/tensorboard'" in out.getvalue()
    assert "slipstream eval '/runs/a run'   slipstream serve '/runs/a run'" in out.getvalue()


def test_rewards_that_are_ready_are_not_told_as_a_fault():
    display, clock, _ = make_display(is_terminal=False)
    for second in range(10):
        clock.advance(1.0)
        display.counters("rewards", {"time/score": 0.3 * second, "time/wait_completions": 0.7 * second})
        display.counters("trainer", {"time/forward_backward": 0.8 * second, "time/wait_generation": 0.2 * second})
    assert "trainer waits for generation 20%" in display._step_line()
    assert "completions" not in display._step_line()


def test_what_stands_for_standard_output_may_only_write(monkeypatch):
    """A notebook's or a program's tee: it is no terminal."""
    said = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=said.append, flush=lambda: None))
    display = Display({"recipe": "q"}, steps=1, max_staleness=0)
    display.step({"step": 0, "version": 1, "reward": 0.5})
    display.finish(make_summary(), {})
    assert "step 1/1  reward 0.500" in "".join(said)


def test_forced_colours_do_not_make_a_notebook_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-color")
    display = Display({"recipe": "q"}, steps=1, max_staleness=0)
    display.step({"step": 0, "version": 1, "reward": 0.5})
    display.finish(make_summary(), {})
    text = capsys.readouterr().out
    assert "step 1/1  reward 0.500" in text
    assert "\x1b" not in text


def test_odd_output_encodings_lose_nothing_but_beauty():
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), force_jupyter=False)
    display = Display({"recipe": "é"}, steps=1, max_staleness=0, console=console)
    display.samples([Sample(prompt="ü", answer=None, before=None, after="漢")])
    display.finish(make_summary(), {})
    console.file.flush()
    assert rb"\u6f22" in raw.getvalue()


def test_small_words():
    assert [duration(s) for s in (0.4, 75, 3725)] == ["0 s", "1 min 15 s", "1 h 02 min"]
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert printable("a\u202eb\tc" + "x" * 300, limit=12) == "a\\u202eb\\tcxxxxxx…"


def test_the_end_explains_an_accuracy_that_reads_0_throughout() -> None:
    display, _, out = make_display(is_terminal=False)
    wrong = Evaluation(0.0, 0.0, 5, reward=0.5)
    display.finish(make_summary(eval=Evaluations(before=wrong, after=wrong)), {})
    assert "no held-out answer reached 1 by eval.measure" in " ".join(out.getvalue().split())
    display, _, out = make_display(is_terminal=False)
    display.finish(make_summary(), {})
    assert "eval.measure" not in out.getvalue()


def test_why_a_run_ended_early_and_its_best_model_are_said() -> None:
    display, _, out = make_display(is_terminal=False)
    display.finish(make_summary(stopped_because="patience", best=Best(version=12, metric="accuracy", value=0.5)), {})
    said = " ".join(out.getvalue().split())
    assert "ended by patience" in said
    assert "best: held-out accuracy 0.500 at step 12" in said


def test_staleness_0_is_called_by_its_name():
    assert config_summary(resolve("quickstart", {"max_staleness": 0}))["mode"].endswith(", synchronous: staleness 0")


def test_an_error_of_several_lines_is_told_in_one():
    display, _, out = make_display(is_terminal=False)
    display.note("environment: a name\n  got:     'f '\n  allowed: letters")
    assert out.getvalue().splitlines()[-1] == "environment: a name; got: 'f '; allowed: letters"


def test_the_screen_shows_the_reward_of_all_completions_and_where_a_score_is_from():
    """`reward` is that of trained groups; a step in which no group was scored shows the mean of the one before."""
    display, clock, out = make_display(is_terminal=False, steps=3)
    display.evaluation("before", Measured(accuracy=0.3))
    for step, more in enumerate(({"scored_reward_mean": 0.125}, {}, {"scored_reward_mean": 0.25})):
        clock.advance(3.0)
        display.step({"step": step, "reward": 0.5} | more)
        if not step:
            display.evaluation("at step 1", Measured(accuracy=0.7))
    steps = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split("  ")[1] for line in steps] == ["reward 0.125", "reward 0.125", "reward 0.250"]
    assert [line.split("  ")[2] for line in steps] == [
        "held-out accuracy 0.300 at step 0",
        *["held-out accuracy 0.700 at step 1"] * 2,
    ]


def test_the_warm_start_says_how_long_it_takes():
    display, clock, out = make_display(is_terminal=False)
    for done in (1, 11, 21, 150):
        display.phase("warm start", done, 150, {"loss": 2.5})
        clock.advance(10.0)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("warm start")]
    assert lines == [
        "warm start 1/150  loss 2.5",
        "warm start 11/150  loss 2.5  2 min 19 s left",
        "warm start 21/150  loss 2.5  2 min 09 s left",
        "warm start 150/150  loss 2.5",
    ]
