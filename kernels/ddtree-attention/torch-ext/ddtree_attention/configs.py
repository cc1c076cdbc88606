"""Which tile sizes a device runs, read from `configs.json`, and into how many splits the prefix is cut.

`configs.json` maps an architecture to a head size (the next power of two of the larger head dimension) to a list of
configurations. The last one whose `rows` are not more than the problem's is taken, so the same problem always takes
the same one: nothing is timed while a model runs. `benchmarks/benchmark.py --sweep` times all of them on a device.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import torch

#: Programs that a streaming multiprocessor should have before the prefix is not split further.
PROGRAMS_A_PROCESSOR = 2
#: Tiles of the prefix that a split reads at least.
TILES_A_SPLIT = 4
MAX_SPLITS = 32


class Config(NamedTuple):
    """Tile sizes and launch options.

    Args:
        block_m (`int`): rows (a node and a query head) of a program.
        block_n (`int`): keys of a tile.
        warps, stages (`int`): warps of a program; tiles in flight.
        max_registers (`int`, *optional*):
            registers a thread may have. Left alone, the assembler saves some on sm_86, sm_89 and sm_100 so that more
            programs fit, and keeps values in memory instead.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    max_registers: int | None = None


@functools.cache
def table() -> dict[str, dict[int, list[tuple[int, Config]]]]:
    """`configs.json`: architecture -> head size -> (fewest rows, configuration), by rows."""
    raw = json.loads(Path(__file__).with_name("configs.json").read_text(encoding="utf-8"))
    return {
        architecture: {
            int(size): sorted((entry.pop("rows"), Config(**entry)) for entry in entries)
            for size, entries in sizes.items()
        }
        for architecture, sizes in raw.items()
    }


def table_of(capability: tuple[int, int] | None, gcn_name: str = "") -> str | None:
    """The architecture in `configs.json` that serves a device, or `None`.

    Args:
        capability (`tuple[int, int]`, *optional*): an NVIDIA device's compute capability.
        gcn_name (`str`, defaults to `""`): an AMD device's architecture, as `gfx942:sramecc+:xnack-`.
    """
    if gcn_name:
        return "gfx942" if gcn_name.partition(":")[0] in ("gfx942", "gfx950") else None
    if capability is None or capability < (8, 0):
        return None
    # Devices not named have a tenth of a megabyte of shared memory, as sm_89 has.
    return {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get(capability, "sm_89")


@functools.cache
def architecture(device: torch.device) -> str | None:
    """As [`table_of`], for a device at hand; the CPU stands for sm_80 under Triton's interpreter."""
    if device.type == "cpu":
        return "sm_80"
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return table_of(None, torch.cuda.get_device_properties(device).gcnArchName)
    return table_of(torch.cuda.get_device_capability(device))


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def head_size(key_dim: int, value_dim: int) -> int:
    """The row of the table that serves a pair of head dimensions; 16 is the least that tensor cores multiply."""
    return max(64, next_power_of_2(max(key_dim, value_dim)))


def choose(architecture: str, key_dim: int, value_dim: int, rows: int) -> Config:
    """The configuration for a problem of `rows` rows (nodes times query heads of a key-value head).

    Raises:
        KeyError: if there is none for the head size.
    """
    entries = table()[architecture][head_size(key_dim, value_dim)]
    return [config for fewest, config in entries if fewest <= rows][-1]


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (or compute units) of a device; an interpreted kernel is not split."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def splits_for(programs: int, slots: int, block_n: int, processors: int) -> int:
    """Parts of the prefix that separate programs read: a power of two, from sizes that the host knows.

    Args:
        programs (`int`): programs without a split.
        slots (`int`): slots of the key tensor, a bound on the prefix's length.
        block_n (`int`): keys of a tile.
        processors (`int`): of the device.
    """
    wanted = min(PROGRAMS_A_PROCESSOR * processors // programs, slots // (TILES_A_SPLIT * block_n), MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)
