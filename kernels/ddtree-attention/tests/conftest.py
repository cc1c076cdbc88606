"""Tests run on a GPU where there is one, else under Triton's interpreter; memory that nobody wrote is not a number."""

import os
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is None:
    # macOS and Windows have no Triton to run the kernels with.
    collect_ignore_glob = ["test_*.py"]

if not torch.cuda.is_available():
    # Read when the kernels are imported, so set before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that a kernel leaves out then fails every comparison."""
    plain = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *size: int, **kwargs: object) -> torch.Tensor:
        memory = plain(self, *size, **kwargs)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
