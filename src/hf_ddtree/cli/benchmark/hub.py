"""The ten data sets of the DDTree paper (hf.co/papers/2604.12989, section 5), read through `datasets`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from huggingface_hub import hf_hub_download

from hf_ddtree.cli.benchmark.extra import needs

_REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_CODE = "\n\nAnswer with Python code in one Markdown block."


@dataclass(frozen=True)
class HubSet:
    """Where a data set is and how a row becomes a prompt.

    Args:
        repository (`str`): on the Hub.
        split (`str`): the part to read.
        prompt (`Callable`): a row's text.
        name (`str`, *optional*): configuration of the repository.
        file (`str`, *optional*): JSON lines to read of a repository that `datasets` does not know how to load.
    """

    repository: str
    split: str
    prompt: Callable[[Any], str]
    name: str | None = None
    file: str | None = None

    def texts(self) -> list[str]:
        """Every prompt; downloads what is not cached.

        Raises:
            ImportError: without `datasets`.
            OSError, ValueError: if the Hub cannot be reached or does not have it.
        """
        load = needs("datasets").load_dataset
        if self.file is not None:
            path = hf_hub_download(self.repository, self.file, repo_type="dataset")
            rows = load("json", data_files={self.split: path}, split=self.split)
        else:
            rows = load(self.repository, self.name, split=self.split)
        return [self.prompt(row) for row in rows]


def _problem(row: Any) -> str:
    return str(row["problem"]) + _REASON


def _instruction(row: Any) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row["input"] else str(row["instruction"])


HUB_SETS = {
    "math500": HubSet("HuggingFaceH4/MATH-500", "test", _problem),
    "gsm8k": HubSet("openai/gsm8k", "test", lambda row: row["question"] + _REASON, name="main"),
    "aime24": HubSet("HuggingFaceH4/aime_2024", "train", _problem),
    "aime25": HubSet("MathArena/aime_2025", "train", _problem),
    "humaneval": HubSet(
        "openai/openai_humaneval", "test", lambda row: "Complete this Python function:\n\n" + row["prompt"]
    ),
    "mbpp": HubSet("google-research-datasets/mbpp", "test", lambda row: row["prompt"] + _CODE, name="sanitized"),
    "livecodebench": HubSet(
        "livecodebench/code_generation_lite", "test", lambda row: row["question_content"] + _CODE, file="test.jsonl"
    ),
    "swe-bench-lite": HubSet("princeton-nlp/SWE-bench_Lite", "test", lambda row: row["problem_statement"]),
    # The first turn of each conversation.
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", "train", lambda row: row["prompt"][0]),
    "alpaca": HubSet("tatsu-lab/alpaca", "train", _instruction),
}
