"""Compiled for GPUs that are not here: every configuration fits, spills nothing and multiplies on tensor cores."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddtree_attention import configs
from ddtree_attention.launch import merge_rows

#: Architectures, the row of the table that serves them, and the bytes of shared memory that a program may have.
SERVED_BY = {
    "sm_80": "sm_80", "sm_86": "sm_89", "sm_89": "sm_89", "sm_90": "sm_90", "sm_100": "sm_100", "sm_120": "sm_89",
    "gfx942": "gfx942",
}  # fmt: skip
SHARED = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10,
    "sm_120": 99 << 10, "gfx942": 64 << 10,
}  # fmt: skip

#: What a model's layers ask for; a merge follows where the prefix is split or there are sinks.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": dict(partial=False),
    "split": dict(),
    "window and softcap": dict(partial=False, window=True, softcap=True, group=2),
    "window, softcap, split, five heads to a group": dict(window=True, softcap=True, group=5),
    "fp16, one head to a group": dict(partial=False, window=True, dtype="fp16", group=1),
    "eight heads to a group": dict(partial=False, window=True, softcap=True, group=8),
}
#: Head dimensions of each row of the table: keys' and values'.
HEAD_DIMS = {64: [(64, 64)], 128: [(128, 128), (80, 80), (96, 96)], 256: [(256, 256), (192, 128)]}


def cases(architecture: str, size: int, features: list[str]) -> list[dict[str, Any]]:
    return [
        dict(architecture=architecture, key_dim=key_dim, value_dim=value_dim, **config._asdict(), **FEATURES[name])
        for _, config in configs.table()[SERVED_BY[architecture]][size]
        for key_dim, value_dim in HEAD_DIMS[size]
        for name in features
    ]


def merges(architecture: str) -> list[dict[str, Any]]:
    return [
        dict(kernel="merge", architecture=architecture, value_dim=dim, block_rows=merge_rows(dim), **settings)
        for dim in (64, 80, 256)
        for settings in (dict(splits=1, sinks=True), dict(splits=configs.MAX_SPLITS))
    ]


def deltas(
    architecture: str, dims: list[tuple[int, int]], dtypes: tuple[str, ...] = ("bf16",)
) -> list[dict[str, Any]]:
    """The gated delta rule's two kernels, with head dimensions of keys and values."""
    return [
        dict(kernel=kernel, architecture=architecture, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
        for key_dim, value_dim in dims
        for dtype in dtypes
        for kernel in ("products", "delta")
    ]


def compiled(wanted: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Each case with what its machine code holds; compiled in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("aot.py")), json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(wanted)
    return found


def faults(found: list[dict[str, Any]]) -> list[str]:
    problems = []
    for kernel in found:
        bad = {name: kernel[name] for name in ("spills",) if kernel[name]}
        if kernel["shared"] > SHARED[kernel["architecture"]]:
            bad["shared"] = kernel["shared"]
        if "kernel" not in kernel:
            if not kernel["tensor_core"]:
                bad["tensor_core"] = 0
            if kernel["architecture"].startswith("sm_") and not kernel["async_copies"]:
                bad["async_copies"] = 0
        problems += [f"{bad} in {kernel}"] * bool(bad)
    return problems


def test_every_architecture_and_head_size_is_listed() -> None:
    assert set(configs.table()) == set(SERVED_BY.values())
    for sizes in configs.table().values():
        assert set(sizes) == set(HEAD_DIMS)


def test_one_configuration_of_each_architecture(tmp_path: Path) -> None:
    wanted = [cases(architecture, 128, ["plain"])[-3] for architecture in ("sm_80", "sm_90", "sm_100", "gfx942")]
    wanted += merges("sm_90")[:1]
    assert [case["block_m"] for case in wanted[:4]] == [128] * 4
    found = compiled(wanted, tmp_path)
    assert not faults(found)
    # The control: tiles that do not fit in the registers are reported.
    tight = wanted[0] | dict(block_m=128, warps=4)
    assert "spills" in faults(compiled([tight], tmp_path))[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", list(HEAD_DIMS))
@pytest.mark.parametrize("architecture", list(SERVED_BY))
def test_every_configuration(architecture: str, size: int, tmp_path: Path) -> None:
    assert not faults(compiled(cases(architecture, size, list(FEATURES)), tmp_path))


def check_deltas(found: list[dict[str, Any]]) -> None:
    assert not faults(found)
    for kernel in found:
        # Products in fp32 run on AMD's matrix cores and on NVIDIA's ordinary ones.
        assert bool(kernel["tensor_core"]) == kernel["architecture"].startswith("gfx"), kernel


def test_the_delta_rule_on_each_architecture(tmp_path: Path) -> None:
    architectures = ("sm_80", "sm_90", "sm_100", "gfx942")
    check_deltas(compiled([case for name in architectures for case in deltas(name, [(128, 128)])], tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", list(SERVED_BY))
def test_every_delta_rule(architecture: str, tmp_path: Path) -> None:
    dims = [(64, 64), (128, 128), (256, 256), (16, 16), (96, 192), (80, 40)]
    check_deltas(compiled(deltas(architecture, dims, ("bf16", "fp32")), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", list(SERVED_BY))
def test_every_merge(architecture: str, tmp_path: Path) -> None:
    assert not faults(compiled(merges(architecture), tmp_path))
