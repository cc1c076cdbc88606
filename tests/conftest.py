"""What every test shares: no network, one thread a process, reproducible properties, the way to the shared folder."""

import os
from pathlib import Path
from typing import Any

# Read when transformers and tokenizers are imported, so set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The kernel runs on CPU tensors here; benchmarks/gpu_check.py and the kernel's own tests run it on a GPU.
os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest
import torch

# Tiny models run faster on one thread, and sums do not depend on the machine's number of cores.
torch.set_num_threads(1)

# An example's time depends on the machine, and a failure must come back on the next run.
hypothesis.settings.register_profile("hf_ddtree", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("hf_ddtree")


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder of large models and data outside the repository; a test that needs it is skipped without it."""
    folder = os.environ.get("HF_DDTREE_SHARED")
    if not folder:
        pytest.skip("HF_DDTREE_SHARED does not name the folder of shared models and data")
    return Path(folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--models-report",
        type=Path,
        metavar="PATH",
        help="run the tests of every model family, those that are slow too, and write what they measured as JSON",
    )


_ROWS = pytest.StashKey[list[Any]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []
    if config.getoption("--models-report") is not None:
        os.environ["HF_DDTREE_REPORTS_MODELS"] = "1"


@pytest.fixture
def models_report(pytestconfig: pytest.Config) -> list[Any]:
    """Where tests of model families leave their rows of the matrix, as dictionaries."""
    return pytestconfig.stash[_ROWS]


def pytest_sessionfinish(session: pytest.Session) -> None:
    rows, config = session.config.stash[_ROWS], session.config
    if hasattr(config, "workeroutput"):
        # A worker of xdist leaves writing to the process that collects all.
        config.workeroutput["models_report"] = rows
    elif (path := config.getoption("--models-report")) is not None:
        from models.measure import write

        write(rows, path)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_ROWS] += node.workeroutput.get("models_report", [])
