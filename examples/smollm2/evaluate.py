"""Step 6, optional: how many tokens a round emits on texts kept out of the training, without running the target again.

    python evaluate.py --work build/smollm2 [--drafter FOLDER]

The target's greedy text is what every round would be verified against: a draft is as good as the path through it that
the text follows. The texts are answers to our own prompts; `smollm2.py run` measures whole generation on others.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import recipe
from blocks import drafted_states, make_blocks
from dataset import Text, load_texts
from evaluate_drafter import emitted
from hf_ddtree.drafters import DFlashModel
from hf_ddtree.drafters.heads import path_scorer
from hf_ddtree.tree import DraftTree, build_draft_tree, build_from_scorer


def draft(
    drafter: DFlashModel, states: torch.Tensor, logits: torch.Tensor, anchor: int, budget: int, plain: bool
) -> DraftTree:
    """The tree of one block (a budget of 1: the chain), by the drafter's selector unless `plain`."""
    branching, budget = (1, recipe.BLOCK - 1) if budget == 1 else (None, budget)
    scorer = None if plain else path_scorer(drafter, states, logits)
    if scorer is None:
        return build_draft_tree(logits.log_softmax(-1), budget, max_branching=branching)
    return build_from_scorer(scorer, budget, max_branching=branching, anchor=anchor)


@torch.inference_mode()
def acceptance_length(
    drafter: DFlashModel, embedding: torch.Tensor, texts: list[Text], budgets: list[int], plain: bool = False
) -> list[float]:
    """Mean tokens a round outside loops for each budget (1: the chain), the bonus token included."""
    lengths: list[list[int]] = [[] for _ in budgets]
    for text in texts:
        last = min(text.loop, len(text) - recipe.BLOCK)
        anchors = np.arange(text.prompt, last)
        if not len(anchors):
            continue
        blocks = make_blocks([text], anchors[None])
        states = drafted_states(drafter, embedding, blocks.slots, blocks.taps, blocks.position_ids, blocks.visible)
        following = blocks.labels[0].tolist()
        tables: dict[int, torch.Tensor] = {}
        for kept, budget in zip(lengths, budgets, strict=True):
            place = 0
            while place < len(anchors):
                if place not in tables:
                    tables[place] = F.linear(states[place], embedding)
                tree = draft(
                    drafter, states[place], tables[place], int(text.tokens[text.prompt + place]), budget, plain
                )
                kept.append(emitted(tree, following[place]))
                place += kept[-1]
    return [sum(kept) / len(kept) for kept in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder that generate_answers.py filled")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--texts", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(2)
    target = AutoModelForCausalLM.from_pretrained(options.work / "target", dtype=torch.float32)
    embedding = target.get_input_embeddings().weight
    drafter = DFlashModel.from_pretrained(options.drafter or options.work / "drafter", dtype=torch.float32).eval()
    texts = load_texts(options.work / "data", "held")
    texts = texts[:: max(1, len(texts) // options.texts)]
    tokenizer = AutoTokenizer.from_pretrained(options.work / "target")
    code = ["Complete this Python function" in tokenizer.decode(text.tokens[: text.prompt]) for text in texts]
    for name, wanted in (("code", True), ("other", False)):
        part = [text for text, is_code in zip(texts, code, strict=True) if is_code == wanted]
        chain, small, large = acceptance_length(drafter, embedding, part, [1, 15, 63])
        print(f"{name}: chain {chain:.2f}, tree of 15 {small:.2f}, of 63 {large:.2f} ({len(part)} texts)")


if __name__ == "__main__":
    main()
