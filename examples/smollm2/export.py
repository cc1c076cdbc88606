"""Step 5: put the trained drafter beside this file, where `hf-ddtree bench --model smollm2` finds it.

    python export.py --work build/smollm2 [--plain]

`--plain` leaves out the selector, which makes it a DFlash drafter that Transformers' own chain takes as well.
"""

import argparse
import shutil
from pathlib import Path

import torch

from hf_ddtree.drafters import DFlashModel

DRAFTER = Path(__file__).parent / "drafter"
LIMIT = 30_000_000


def without_selector(drafter: DFlashModel) -> DFlashModel:
    config = type(drafter.config)(**drafter.config.to_dict())
    config.selector_rank = config.conv_kernel_size = 0
    result = DFlashModel(config)
    result.load_state_dict({name: drafter.state_dict()[name] for name in result.state_dict()})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder that train.py filled")
    parser.add_argument("--out", type=Path, default=DRAFTER)
    parser.add_argument("--plain", action="store_true", help="leave out the selector")
    options = parser.parse_args()
    drafter = DFlashModel.from_pretrained(options.work / "drafter", dtype=torch.float32)
    if options.plain:
        drafter = without_selector(drafter)
    saved = options.work / "exported"
    drafter.to(torch.bfloat16).save_pretrained(saved)
    options.out.mkdir(exist_ok=True)
    size = 0
    for path in sorted(saved.iterdir()):
        # Contents without modes: safetensors writes files that only their owner may read.
        shutil.copyfile(path, options.out / path.name)
        size += path.stat().st_size
    print(f"{size:,} bytes in {options.out}")
    if size > LIMIT:
        raise SystemExit(f"the drafter takes {size:,} bytes, but should stay under {LIMIT:,}.")


if __name__ == "__main__":
    main()
