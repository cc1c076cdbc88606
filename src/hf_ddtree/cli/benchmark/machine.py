"""What a measurement depends on besides its settings: versions, the commit, the machine, the weights."""

import hashlib
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_ddtree

_PACKAGES = ("torch", "transformers", "accelerate", "numpy", "numba")


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that time is spent in; `None` for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "hf_ddtree": hf_ddtree.__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def commit(folder: Path = Path(hf_ddtree.__file__).parent) -> str | None:
    """The commit of the checkout that the package is imported from, `+` behind it where files differ from it."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A virtual environment may lie in a checkout of something else.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = git("rev-parse", "HEAD")
    return head and head + ("+" if git("status", "--porcelain", "--untracked-files=no", ".") else "")


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, memory, threads and accelerator."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type,
    }
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda or torch.version.hip}
    return facts


def load() -> float | None:
    """Processes that wanted a core in the last minute, on average: what else the machine was doing."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    if sys.platform == "win32":
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def fingerprint(model: PreTrainedModel) -> str:
    """Tells whether weights are the same, by the first bytes of each."""
    state = hashlib.sha256()
    for name, weight in model.state_dict().items():
        first = weight.detach().flatten()[:16].float().cpu()
        state.update(f"{name} {tuple(weight.shape)} {first.tolist()}".encode())
    return state.hexdigest()[:16]


def forget_peak(device: torch.device) -> None:
    """Starts the measurement of a run's memory, where one run's can be told."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Bytes, or `None` where the system does not tell; see [`what_peak_is`]."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def what_peak_is(device_type: str) -> str:
    """What the figures of [`peak_memory`] are on a device of a type."""
    if device_type == "cuda":
        return "torch.cuda.max_memory_allocated of a run, weights included"
    return "largest resident set of the process so far, weights included and whatever ran before"
