"""Step 2: train the target, a small Qwen3 causal language model, on the corpus.

    python train_target.py --work build/demo_pair

Deep and thin on purpose: a token's cost is then mostly a fixed cost per layer, as it is for a large model on a GPU,
and a tree of nodes costs little more than one token. Writes `target/` in standard layout (bf16, safetensors).
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from training import Trainer, arguments

SEQUENCE, BATCH = 512, 8


def build_target(vocab_size: int, end_id: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=18,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.3)  # each layer starts near the identity, which trains deep stacks faster
    return model


def main() -> None:
    options = arguments(__doc__, steps=1350)
    tokenizer = AutoTokenizer.from_pretrained(options.work / "tokenizer")
    train = torch.from_numpy(np.load(options.work / "train.npy")).long()
    held = torch.from_numpy(np.load(options.work / "held.npy")).long()
    model = build_target(len(tokenizer), tokenizer.eos_token_id)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} training tokens")
    trainer = Trainer(model, options.steps, options.work / "target.pt", muon_lr=0.02, adam_lr=3e-3, decay=0.6)
    generator = torch.Generator().manual_seed(trainer.step)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            logits = F.linear(hidden.flatten(0, 1), model.lm_head.weight)
        return F.cross_entropy(logits.float(), rows[:, 1:].flatten())

    compiled = torch.compile(loss_of)

    def sample(tokens: torch.Tensor, source: torch.Generator) -> torch.Tensor:
        starts = torch.randint(0, len(tokens) - SEQUENCE - 1, (BATCH,), generator=source)
        return torch.stack([tokens[i : i + SEQUENCE + 1] for i in starts])

    def losses() -> Iterator[torch.Tensor]:
        while True:
            yield compiled(sample(train, generator))

    trainer.run(losses())
    model.eval()
    with torch.no_grad():
        source = torch.Generator().manual_seed(0)
        mean = sum(loss_of(sample(held, source)).item() for _ in range(8)) / 8
    print(f"held-out loss {mean:.3f} a token")
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(options.work / "target")
    tokenizer.save_pretrained(options.work / "target")


if __name__ == "__main__":
    main()
