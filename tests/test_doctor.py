"""The verdict follows from what was found."""

from __future__ import annotations

import email.message
import importlib.metadata
import shutil
import socket
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from slipstream.doctor import Findings, features, find_mps, missing_packages, render
from slipstream.jail.isolation import BARRIERS
from slipstream.observe.hardware import Hardware, describe
from slipstream.observe.summary import versions

HARDWARE = Hardware(
    cpu="some",
    num_cores=2,
    num_cores_machine=4,
    memory_bytes=8 << 30,
    shm_free_bytes=1 << 30,
    gpus=(),
    torch_threads=2,
    platform="Linux",
)


def test_a_good_machine_and_a_poor_one() -> None:
    holds = dict.fromkeys(BARRIERS, True)
    good = {f.name: f for f in features(HARDWARE, holds, {"dev": []})}
    assert [name for name, feature in good.items() if not feature.works] == ["generation on a GPU", "training on a GPU"]
    with_gpu = {f.name: f for f in features(Hardware(**HARDWARE.to_dict() | {"gpus": ("H100 (80 GiB)",)}), holds, {})}
    for name, field in (("generation on a GPU", "generator.device"), ("training on a GPU", "trainer.device")):
        assert with_gpu[name].works
        assert with_gpu[name].why == f"H100 (80 GiB): {field} = 'cuda'"
    poor_hardware = Hardware(**HARDWARE.to_dict() | {"num_cores": 1, "shm_free_bytes": None, "gpus": ()})
    poor = {
        f.name: f
        for f in features(
            poor_hardware,
            holds | {"network": False},
            {"dev": ["pytest"]},
            no_processes="no pidfd",
            has_equal_bits=False,
        )
    }
    assert [name for name, feature in poor.items() if feature.works] == ["training on the CPU"]
    assert "not isolated here: network" in poor["verifiers that evaluate model text"].why
    assert poor["extra 'dev'"].why == "missing: pytest; `pip install 'slipstream-rl[dev]'`"
    apart = features(HARDWARE, holds, {"vllm": ["vllm"]})[-1]
    assert apart.why.endswith(
        "`pip install 'slipstream-rl[vllm]'`, or an environment of its own, named by generator.vllm.python"
    )
    many = features(HARDWARE, holds, {"dev": list("abcde")})[-1]
    assert many.why == "missing: a, b, c and 2 more; `pip install 'slipstream-rl[dev]'`"


def test_a_driver_that_cuda_cannot_use_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It tells of a GPU all the same."""

    def refused(_: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refused)
    assert describe().gpus == ()
    assert "driver on your system is too old" in caplog.text


def test_an_extra_asks_for_what_is_for_this_system(monkeypatch: pytest.MonkeyPatch) -> None:
    about = email.message.Message()
    for extra in ("dev", "vllm"):
        about["Provides-Extra"] = extra
    for requirement in (
        "absent-always>=1; extra == 'dev'",
        "absent-elsewhere; (platform_system == 'Nowhere') and extra == 'vllm'",
        "absent-but-no-extra>=2",
    ):
        about["Requires-Dist"] = requirement
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: about)
    assert missing_packages() == {"dev": ["absent-always"], "vllm": []}


def test_text_in_brackets_is_shown() -> None:
    console = Console(record=True, width=200)
    isolation = dict.fromkeys(BARRIERS, True)
    found = features(HARDWARE, isolation, {"dev": ["pytest[dev]"]})
    render(
        Findings(
            versions=versions(), hardware=HARDWARE, isolation=isolation, extras={"dev": ["pytest[dev]"]}, features=found
        ),
        console,
    )
    assert "missing: pytest[dev]; `pip install 'slipstream-rl[dev]'`" in console.export_text()


def test_a_wheel_has_no_commit() -> None:
    console = Console(record=True, width=200)
    found = Findings(
        versions=msgspec.structs.replace(versions(), commit=None),
        hardware=HARDWARE,
        isolation={},
        extras={},
        features=(),
    )
    render(found, console)
    shown = console.export_text()
    assert "none: this is no checkout" in shown
    assert "None" not in shown


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_daemon_of_mps_is_one_that_listens(
    kind: socket.SocketKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    works, why = find_mps()
    assert not works
    assert str(tmp_path) in why
    assert "not installed" in why
    with socket.socket(socket.AF_UNIX, kind) as daemon:
        daemon.bind(str(tmp_path / "control"))
        daemon.listen()
        assert find_mps() == (True, f"its daemon listens in {tmp_path}")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    works, why = find_mps()
    assert not works, "a file that was left is no daemon"
    assert "`nvidia-cuda-mps-control -d` starts it" in why
    with_gpu = Hardware(**HARDWARE.to_dict() | {"gpus": ("H100 (80 GiB)",)})
    found = features(with_gpu, dict.fromkeys(BARRIERS, True), {}, mps=(works, why))
    assert [one.works for one in found if "MPS" in one.name] == [False]
