"""What the steps share: the drafter's shape, and the modules of `examples/demo_pair` that serve here as well."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "demo_pair"))

TAPS = [1, 8, 14, 21, 27]
BLOCK, MASK_ID, NO_LABEL = 8, 16, -100
WORDS: dict[str, list[str]] = json.loads((Path(__file__).parent / "words.json").read_text())
