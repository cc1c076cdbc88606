"""Fails where `import hf_ddtree` costs 0.3 s or more beyond transformers' own import (best of 5 fresh processes).

Transformers' own import means what any program that generates has loaded: the auto classes, generation and the base of
every model, which transformers itself loads lazily. Processor time, so that a busy machine fails no good change.
"""

import subprocess
import sys

LIMIT_S = 0.3
MEASURE = """
import time
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
start = time.process_time()
import hf_ddtree
print(time.process_time() - start)
"""


def measure() -> float:
    command = [sys.executable, "-c", MEASURE]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


best = min(measure() for _ in range(5))
print(f"import hf_ddtree: {best:.3f} s beyond transformers' own import (limit {LIMIT_S} s)")
sys.exit(best >= LIMIT_S)
