"""Compiles the kernels for GPUs that need not be there and reads the machine code. Prints one JSON object a line.

    python aot.py '[{"architecture": "sm_90", "key_dim": 128, "value_dim": 128, ...}]'

A process of its own: under `TRITON_INTERPRET=1`, which the other tests set, there is nothing to compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ddtree_attention.delta import MAX_REGISTERS, PAIR_STEP, STAGES, STATE_STEP, TILE, WARPS, value_block
from ddtree_attention.delta_kernels import delta_forward, delta_products
from ddtree_attention.kernels import tree_attention_forward, tree_attention_merge

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

_TENSORS = ("Query", "Key", "Value", "Depths", "SubtreeEnds", "Ancestors", "Start", "Prefix", "Nodes")
_FLOATS = ("scale", "softcap")
_POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
_DELTA = dict.fromkeys(("Query", "Key", "Sums", "State", "System", "Reads", "Corrections"), "*fp32")


def target_of(architecture: str) -> GPUTarget:
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def signature(function: Any, constants: dict[str, Any], dtype: str) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for name in function.arg_names:
        if name in constants:
            kinds[name] = "constexpr"
        elif "System" in function.arg_names and name in _DELTA:
            kinds[name] = _DELTA[name]
        elif name in ("Partial", "LogSum"):
            kinds[name] = "*fp32"
        elif name == "Output":
            kinds[name] = "*fp32" if constants.get("PARTIAL") else _POINTERS[dtype]
        elif name in ("Query", "Key", "Value", "Sinks", "Beta"):
            kinds[name] = _POINTERS[dtype]
        elif name in _TENSORS:
            kinds[name] = "*i32"
        else:
            kinds[name] = "fp32" if name in _FLOATS else "i32"
    return kinds


def compile_one(function: Any, architecture: str, constants: dict[str, Any], dtype: str, **options: int) -> Any:
    kinds = signature(function, constants, dtype)
    # What the launcher finds out at run time: addresses and strides are multiples of 16.
    aligned = [i for i, name in enumerate(kinds) if kinds[name].startswith("*") or name.endswith("_stride")]
    source = ASTSource(
        fn=function,
        signature=kinds,
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    return triton.compile(source, target=target_of(architecture), options=options)


def forward_constants(case: dict[str, Any]) -> dict[str, Any]:
    key_dim, value_dim = case["key_dim"], case["value_dim"]
    return dict(
        KEY_VALUE_HEADS=8,
        GROUP=case.get("group", 4),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_BLOCK=triton.next_power_of_2(key_dim),
        VALUE_BLOCK=triton.next_power_of_2(value_dim),
        BLOCK_M=case["block_m"],
        BLOCK_N=case["block_n"],
        PARTIAL=case.get("partial", True),
        HAS_WINDOW=case.get("window", False),
        HAS_SOFTCAP=case.get("softcap", False),
        UPCAST=False,
    )


def examine(kernel: Any, architecture: str) -> dict[str, Any]:
    """Registers, spills, shared memory and tensor-core instructions of a compiled kernel."""
    if architecture.startswith("gfx"):
        code = kernel.asm["amdgcn"]

        def field(name: str) -> int:
            return int(re.search(rf"\.{name}:\s+(\d+)", code)[1])

        return dict(
            registers=field("vgpr_count"),
            spills=field("vgpr_spill_count") + field("private_segment_fixed_size"),
            shared=max(field("group_segment_fixed_size"), kernel.metadata.shared),
            tensor_core=len(re.findall(r"\bv_mfma", code)),
            async_copies=0,
        )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        Path(path).write_bytes(kernel.asm["cubin"])
        usage, code = (
            subprocess.run([CUOBJDUMP, flag, path], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    return dict(
        registers=registers,
        spills=stack + local + len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared=kernel.metadata.shared,
        tensor_core=len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA|UTCQMMA)\b", code)),
        async_copies=len(re.findall(r"\b(?:LDGSTS|UTMALDG|UBLKCP)", code)),
    )


def run(case: dict[str, Any]) -> dict[str, Any]:
    architecture, dtype = case["architecture"], case.get("dtype", "bf16")
    if case.get("kernel") == "merge":
        value_dim = case["value_dim"]
        constants = dict(
            HEADS=32, VALUE_DIM=value_dim, VALUE_BLOCK=triton.next_power_of_2(value_dim), SPLITS=case["splits"],
            BLOCK_ROWS=case["block_rows"], HAS_SINKS=case.get("sinks", False),
        )  # fmt: skip
        kernel = compile_one(tree_attention_merge, architecture, constants, dtype, num_warps=4)
    elif case.get("kernel") in ("products", "delta"):
        constants = dict(KEY_HEADS=16, GROUP=2, KEY_DIM=case["key_dim"], TILE=TILE, KEY_STEP=PAIR_STEP)
        function, options = delta_products, dict(num_warps=WARPS, num_stages=STAGES)
        if case["kernel"] == "delta":
            value_dim, function = case["value_dim"], delta_forward
            options |= {} if architecture.startswith("gfx") else {"maxnreg": MAX_REGISTERS}
            constants |= dict(KEY_STEP=STATE_STEP, VALUE_DIM=value_dim, BLOCK_V=value_block(value_dim), STAGES=STAGES)
        kernel = compile_one(function, architecture, constants, dtype, **options)
    else:
        options = dict(num_warps=case["warps"], num_stages=case["stages"])
        if case.get("max_registers"):
            options["maxnreg"] = case["max_registers"]
        kernel = compile_one(tree_attention_forward, architecture, forward_constants(case), dtype, **options)
    return case | examine(kernel, architecture)


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps(run(case)), flush=True)
