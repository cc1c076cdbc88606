"""What every test shares: no network, one thread a process, reproducible properties, the way to the shared folder."""

import os
from pathlib import Path

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
