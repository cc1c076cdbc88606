"""How many tokens a round emits on held-out texts, by chain and by tree, without running the target again.

    python evaluate_drafter.py --work build/demo_pair

The target is greedy, so a held-out text is what every round would be verified against: a draft is as good as the
path through it that the text follows. Rounds that start inside a loop are not counted.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from dataset import Text, load_texts
from drafting import BLOCK, draft, make_blocks
from hf_ddtree.drafters import DFlashModel
from hf_ddtree.tree import DraftTree, build_draft_tree


def emitted(tree: DraftTree, following: list[int]) -> int:
    """Tokens a round emits: the accepted ones and the bonus token."""
    node = 0
    for depth, token in enumerate(following):
        if token not in tree.children[node]:
            return depth + 1
        node = tree.children[node][token]
    return len(following) + 1


@torch.inference_mode()
def acceptance_length(
    drafter: DFlashModel, embedding: torch.Tensor, texts: list[Text], budget: int, chain: bool
) -> float:
    """Mean tokens a round outside loops, the bonus token included; `chain` drafts one path instead of a tree."""
    # Stopping a block before the end keeps every round whole.
    ends = [min(text.loop, len(text) - BLOCK) for text in texts]
    places = {row: text.prompt for row, text in enumerate(texts) if text.prompt < ends[row]}
    lengths: list[int] = []
    while places:
        blocks = make_blocks([texts[row] for row in places], np.array([[place] for place in places.values()]))
        *inputs, labels = blocks.tensors()
        log_probs = draft(drafter, embedding, *inputs).log_softmax(-1)
        for row, table, following in zip(list(places), log_probs, labels[:, 0].tolist(), strict=True):
            lengths.append(emitted(build_draft_tree(table, budget, max_branching=1 if chain else None), following))
            places[row] += lengths[-1]
        places = {row: place for row, place in places.items() if place < ends[row]}
    return sum(lengths) / len(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder that train_drafter.py filled")
    work = parser.parse_args().work
    torch.set_num_threads(2)
    embedding = Qwen3ForCausalLM.from_pretrained(work / "target", dtype=torch.float32).get_input_embeddings().weight
    drafter = DFlashModel.from_pretrained(work / "drafter", dtype=torch.float32).eval()
    texts = load_texts(work / "data", "held")
    print(f"chain: {acceptance_length(drafter, embedding, texts, BLOCK - 1, chain=True):.2f} tokens a round")
    for budget in (7, 15, 31, 63):
        print(
            f"tree of {budget}: {acceptance_length(drafter, embedding, texts, budget, chain=False):.2f} tokens a round"
        )


if __name__ == "__main__":
    main()
