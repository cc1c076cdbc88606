"""Loads drafters from the server that HF_ENDPOINT names, and prints what came of each as JSON.

A process of its own: huggingface_hub reads its environment once, when it is imported.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, logging

from hf_ddtree import DFlashModel

logging.set_verbosity_error()
logging.disable_progress_bar()


def outcome(loader: Any, repository: str, **kwargs: Any) -> dict[str, Any]:
    if "dtype" in kwargs:
        kwargs["dtype"] = getattr(torch, kwargs["dtype"])
    try:
        model = loader.from_pretrained(repository, **kwargs)
    except (OSError, ValueError) as error:
        return {"error": type(error).__name__, "message": str(error)}
    checksum = sum(value.double().abs().sum().item() for value in model.state_dict().values())
    return {"class": type(model).__name__, "dtype": str(model.dtype), "checksum": checksum}


def main(jobs: list[dict[str, Any]]) -> None:
    loaders = {"drafter": DFlashModel, "auto": AutoModel, "causal": AutoModelForCausalLM}
    results = {}
    for job in jobs:
        name = job.pop("name")
        results[name] = outcome(loaders[job.pop("loader", "drafter")], **job)
    print(json.dumps(results))


if __name__ == "__main__":
    main(json.load(sys.stdin))
