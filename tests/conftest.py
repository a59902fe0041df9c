"""What holds for the test process and for all that it starts."""

import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from accounted import check_runs
from catalogued import check_metric_names
from forked_text import forking
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from slipstream.controller.nursery import NURSERY
from slipstream.core import lifeline
from slipstream.jail import sandbox

# What is imported makes a million objects that stay: garbage is looked for less often, as by the command line.
gc.set_threshold(50_000)

# Before torch is loaded: waiting threads sleep, as in the processes of a run (`controller/placement.py`).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

# For each test to choose, whatever the shell, the site or a parallel pytest has set. No library that reads one of these
# has been imported yet.
_CHOSEN_BY_TESTS = """
    COLUMNS LINES FORCE_COLOR NO_COLOR OMP_PROC_BIND GOMP_CPU_AFFINITY LOCAL_RANK LOCAL_WORLD_SIZE
    HF_ENDPOINT HF_HUB_OFFLINE HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_DATASETS_CACHE HF_DATASETS_OFFLINE
    TRANSFORMERS_OFFLINE
"""
for _name in (*_CHOSEN_BY_TESTS.split(), *(name for name in os.environ if name.lower().endswith("_proxy"))):
    os.environ.pop(_name, None)

# Hypothesis draws the same examples in every run: who changes nothing sees nothing change. `--hypothesis-profile drawn`
# draws others: what it finds becomes an `@example`, or a test of its own.
# For the same examples it may not look for numbers and texts in the source of what happens to be imported.
# Neither judges an example by how long it takes: that is the machine's.
_AT_ANY_PACE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, **_AT_ANY_PACE)
settings.register_profile("drawn", **_AT_ANY_PACE)
settings.load_profile("fixed")
_NO_CONSTANTS, _constants_of_imported = providers.Constants(), providers._get_local_constants
providers._get_local_constants = lambda: _NO_CONSTANTS if settings().derandomize else _constants_of_imported()

# Pools of this process end before they start a spare worker, which takes half of the time of a small run.
sandbox._SPARES_AFTER_S = 60.0

# What a shell runs in the background ignores Ctrl-C, what nohup runs SIGHUP, and so would every run that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle-files", type=int, metavar="SEED", help="run the files of tests in another order")


# Files that take longest, the longest first: the last to be begun are then short, and no worker waits for another's.
# Whole runs, which wait for much of their time, and others take turns. Names are those of files: no two have the same.
LONGEST = """
    watch_page eval_episodes report_page bad_input signals hub resume replica episode_versions code lora_run lora_ranks
    asynchronous_run paged_kernels stages_dpo reshard episodes_equal_reference agents_in_pools stages bad_environments
    sync_equals_reference plan_command critic_run gateway episodes_resumed workers endings hostile_checkpoints
    distillation_run calibrate eval_cli staged_engines code_run rank_checkpoints algorithm_runs critic
    pipeline_parallel_run sandbox custom_pipeline expert_parallel agent_runs sharded_models vllm_run relayed_versions
    eval_sets lora poisoned_run planned_bytes floods job_files forks_seen absurd_input restarts_run channel_tcp
    stages_data vllm_client hostile_reward stages_trained published_recipes pools vanished_folder advice early_stopping
    eval_tools paged_run parked agent_programs precision step_on_make_believe_cuda health stored_base comparison
    training resident_versions serve families context_ranks staleness_by_loss kernel_counts teacher quantized_versions
    simulated_policies chat corrections executors outlet architecture reward_model report task_library wheel
    engine_bits critic_executor over_ranks loss_identities cli wire staged_replica
"""


PARALLEL = "tests/parallel/"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files and keep the order within each, since its tests share what it has made."""
    files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    place = {f"test_{name}.py": index for index, name in enumerate(LONGEST.split())}
    files.sort(key=lambda tests: place.get(tests[0].path.name, len(place)))
    if (seed := config.getoption("--shuffle-files")) is not None:
        random.Random(seed).shuffle(files)
    items[:] = itertools.chain.from_iterable(files)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, and those of `parallel` to one worker, which forks all ranks from one import."""
    from xdist.scheduler import LoadFileScheduling

    class WholeFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return PARALLEL if file.startswith(PARALLEL) else file

    return WholeFiles(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let the search for garbage pass over all that was imported and collected: a million objects, and they stay."""
    gc.collect()
    gc.freeze()


# Threads of libraries that live as long as the process, and wait in Python: they end with it and harm nobody.
_LASTING = ("tqdm.", "multiprocessing.")


_THREADS_END_WITHIN_S = 10.0


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """One that comes back from C++ while the interpreter ends would abort it, when all tests have passed."""
    before = set(threading.enumerate())
    yield
    deadline_s = time.monotonic() + _THREADS_END_WITHIN_S
    left = [thread for thread in threading.enumerate() if thread not in before and not _is_lasting(thread)]
    for thread in left:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    assert not [thread for thread in left if thread.is_alive()], "the test left threads behind"


def _is_lasting(thread: threading.Thread) -> bool:
    """By the class, or by what runs in it."""
    target = getattr(thread, "_target", None)
    return type(thread).__module__.startswith(_LASTING) or getattr(target, "__module__", "").startswith(_LASTING)


@pytest.fixture
def stops() -> dict[str, list[tuple[float, float]]]:
    """Where a test notes when it has stopped which process (`accounted.Stops`): those seconds are not the run's."""
    return {}


@pytest.fixture(autouse=True)
def _runs_are_accounted_for(
    request: pytest.FixtureRequest, stops: dict[str, list[tuple[float, float]]]
) -> Iterator[None]:
    """Every run that a test leaves behind: its seconds, and the names of its metrics."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if folder is not None:
        check_runs(folder, stops=stops)
        check_metric_names(folder)


@pytest.fixture(autouse=True, scope="session")
def _one_import_for_foreign_text() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture(scope="module")
def _nursery_of_the_file() -> Iterator[None]:
    yield
    NURSERY.close()


@pytest.fixture
def one_import(_nursery_of_the_file: None) -> None:
    """One nursery for all tests of the file: a run that is refused would end its own in the middle of its imports."""
    NURSERY.begin()


@pytest.fixture
def no_import(_nursery_of_the_file: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nursery as that of `one_import`, for files in which no run begins: it imports nothing."""
    with monkeypatch.context() as patch:
        command = lifeline.command
        patch.setattr(lifeline, "command", lambda _, *arguments: command("bare_nursery", *arguments))
        NURSERY.begin()


@pytest.fixture
def own_nursery(request: pytest.FixtureRequest) -> Iterator[None]:
    """No nursery but that of the run, which is gone with it."""
    for of_the_file in {"one_import", "no_import"} & set(request.fixturenames):
        request.getfixturevalue(of_the_file)  # first, whatever the order
    NURSERY.close()
    yield
    assert not NURSERY.is_there
