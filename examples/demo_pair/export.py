"""Step 5: copy the finished pair into the package, where `hf-ddtree demo` finds it.

    python export.py --work build/demo_pair

Fills `src/hf_ddtree/demo_pair/` with `target/`, `drafter/`, `prompts.jsonl`, `NOTICE` and Python's licence, and says
how large it is.
"""

import argparse
import shutil
import sys
import sysconfig
from pathlib import Path

PACKAGED = Path(__file__).parents[2] / "src" / "hf_ddtree" / "demo_pair"
LIMIT = 25_000_000
NOTICE = """\
The target in this folder was trained on the source of the standard library of CPython {version}, and the drafter on
text that this target wrote. prompts.jsonl holds short excerpts of the same source, unchanged, from files kept out of
the training.

The standard library is Copyright (c) 2001 Python Software Foundation; All Rights Reserved, and is distributed under
the Python Software Foundation License Version 2, whose text is in LICENSE-PYTHON.txt.

The pair is made for demonstration: it shows how speculative decoding behaves, and is of no use as a code assistant.
The recipe that made it is in examples/demo_pair of the source repository.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder that train_drafter.py filled")
    parser.add_argument("--out", type=Path, default=PACKAGED)
    options = parser.parse_args()

    for part in ("target", "drafter"):
        shutil.rmtree(options.out / part, ignore_errors=True)
        # Contents without modes: safetensors writes files that only their owner may read.
        shutil.copytree(options.work / part, options.out / part, copy_function=shutil.copyfile)
    shutil.copyfile(options.work / "prompts.jsonl", options.out / "prompts.jsonl")
    shutil.copyfile(Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt", options.out / "LICENSE-PYTHON.txt")
    (options.out / "NOTICE").write_text(NOTICE.format(version=".".join(map(str, sys.version_info[:2]))))

    sizes = {path: path.stat().st_size for path in sorted(options.out.rglob("*")) if path.is_file()}
    for path, size in sizes.items():
        print(f"{size:>12,}  {path.relative_to(options.out)}")
    total = sum(sizes.values())
    print(f"{total:>12,}  in all")
    if total > LIMIT:
        raise SystemExit(f"the pair takes {total:,} bytes, but the package has room for {LIMIT:,}.")


if __name__ == "__main__":
    main()
