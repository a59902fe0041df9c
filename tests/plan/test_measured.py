"""Files of measured curves: written and read alike, refused when torn, and where eta does not fall."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import msgspec
import pytest
from measured_kit import BATCHES, measured, quickstart_shape

from benchmarks.eta_figure import eta_figure, rises, write_measured
from slipstream.core.errors import ConfigError
from slipstream.plan.measured import Point, read_measured

SVG = "{http://www.w3.org/2000/svg}"


def test_a_file_is_read_as_it_was_written(tmp_path):
    written = measured(quickstart_shape())
    write_measured(written, tmp_path / "eta.json")
    assert read_measured(tmp_path / "eta.json") == written


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda file: file.write_text("{"), "holds no measured curves"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "holds no measured curves"),
        (lambda file: file.write_text(file.read_text().replace('"format": 1', '"format": 9')), "of another format"),
        (lambda file: file.write_text(file.read_text().replace('"batch": 8', '"batch": 1')), "without order"),
        (lambda file: file.write_text(file.read_text().replace('"devices": 2', '"devices": 0')), "cannot be"),
        (
            lambda file: file.write_text(file.read_text().replace('"device": "cpu"', '"device": "abacus"')),
            "no measured",
        ),
        (lambda file: file.unlink(), "cannot be read"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, change, told):
    file = tmp_path / "eta.json"
    write_measured(measured(quickstart_shape()), file)
    change(file)
    with pytest.raises(ConfigError, match=told):
        read_measured(file)


def point(batch, low, high):
    return Point(batch=batch, seconds=(low + high) / 2, low=low, high=high)


def test_eta_rises_only_beyond_the_spread_of_the_turns():
    falling, within, above = point(1, 9, 11), point(2, 5, 9.5), point(4, 9.6, 12)
    assert rises([falling, within]) == []
    assert rises([within, above]) == [(within, above)]
    assert rises([within, point(4, 9.4, 12)]) == []  # the ranges overlap


def test_the_figure_has_every_point_where_it_belongs():
    """Halving the seconds is one step down, doubling the batch one to the right, whatever the place: both are logs."""
    made = measured(quickstart_shape(), train_s=lambda cores, batch: 0.064 / batch / cores, generate_s=lambda c, b: 0.1)
    root = ET.fromstring(eta_figure(made))
    lines = [line.get("points") for line in root.iter(f"{SVG}polyline")]
    assert len(lines) == 4  # two sides on one core and on two
    train = [tuple(map(float, place.split(","))) for place in lines[0].split()]
    assert len(train) == len(BATCHES)
    across = [x for x, _ in train]
    down = [y for _, y in train]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.3)  # 1 -> 8 -> 64
    assert down[1] - down[0] == pytest.approx(down[2] - down[1], abs=0.3)
    assert down[1] > down[0]  # SVG's y goes down
    two_cores = [float(place.split(",")[1]) for place in lines[1].split()]
    assert all(other > one for one, other in zip(down, two_cores, strict=True))
    flat = {float(place.split(",")[1]) for place in lines[2].split()}
    assert len(flat) == 1
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert any("made up, 2 cores" in text for text in texts)
    assert any("A <CPU>" in text for text in texts)  # escaped in the file
    assert "A <CPU>" not in eta_figure(made)


def test_a_figure_of_one_side_alone_is_drawn():
    made = measured(quickstart_shape())
    only = msgspec.structs.replace(made.models[0], curves=made.models[0].curves[:1])
    root = ET.fromstring(eta_figure(msgspec.structs.replace(made, models=(only,))))
    assert len(list(root.iter(f"{SVG}polyline"))) == 1
