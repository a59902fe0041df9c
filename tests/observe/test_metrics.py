import json
from pathlib import Path

from slipstream.core.run_log import read_metrics
from slipstream.observe.metrics import MetricsWriter


def test_lines_are_flat_and_say_null_for_nan_and_inf(tmp_path: Path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(
        step=0, version=1, wall_s=0.5, metrics={"reward": 0.5, "loss": float("nan"), "kl": {"max": float("inf")}}
    )
    expected = {"step": 0, "version": 1, "wall_s": 0.5, "reward": 0.5, "loss": None, "kl/max": None}
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == expected  # written before close
    assert read_metrics(tmp_path / "metrics.jsonl") == [expected]
    writer.close()


def test_a_torn_tail_is_left_out_and_cut_off_on_reopening(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "rew')
    assert read_metrics(path) == [{"step": 0}]
    writer = MetricsWriter(path)
    writer.write(step=1, version=2, wall_s=1.0, metrics={})
    writer.close()
    assert [line["step"] for line in read_metrics(path)] == [0, 1]
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 200_000)
    MetricsWriter(path).close()
    assert path.read_bytes() == b""
