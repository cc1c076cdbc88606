"""The one configuration every DFlash checkpoint is normalised to, whatever layout it was published in."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from hf_ddtree.drafters.heads.check import check_heads

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class DFlashConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DFlashModel`], a block-diffusion drafter (DFlash, hf.co/papers/2602.06036).

    [`DFlashConfig.from_pretrained`] reads the layouts listed in `hf_ddtree.drafters.formats`; `save_pretrained` writes
    the z-lab layout.

    Args:
        block_size (`int`, *optional*, defaults to `16`):
            Slots of a pass: the anchor in slot 0 and `block_size - 1` masks.
        sample_from_anchor (`bool`, *optional*, defaults to `False`):
            What a slot predicts. `False`, the fill-in layout: slot k the token k after the anchor, so that slot 0 is
            read by nobody and `block_size - 1` tokens are drafted. `True`, the anchor layout: slot k the token k + 1
            after the anchor, and `block_size` tokens are drafted.
        mask_token_id (`int`):
            Token whose target embedding fills the masked slots. May lie beyond the tokenizer, inside the embedding.
        target_layer_ids (`list[int]`):
            Taps: indices of the target's decoder layers whose output feeds the drafter.
        num_target_layers (`int`, *optional*):
            Decoder layers of the target the drafter was trained for; checked against the target.
        target_hidden_size (`int`, *optional*):
            Width of the target's hidden states. Defaults to `hidden_size`.
        causal_layers (`list[bool]`, *optional*):
            For each layer, whether a slot sees only earlier slots of its block. Defaults to all `False`.
        sliding_window (`int`, *optional*):
            Window in tokens of the layers whose `layer_types` entry is `"sliding_attention"`.
        inclusive_window (`bool`, *optional*, defaults to `False`):
            Whether a key exactly `sliding_window` tokens away is still visible, as in Transformers' own DFlash models.
        input_embedding_scale (`float`, *optional*):
            Factor on the target's raw embedding rows. Without it the target's embedding module is called as it is.
        output_multiplier (`float`, *optional*):
            Factor on the logits, before the softcap.
        final_logit_softcapping (`float`, *optional*):
            Softcap of the logits. Defaults to the target's own, unless the drafter has its own head.
        own_embedding (`bool`, *optional*, defaults to `False`):
            Whether the checkpoint holds the embedding of the slots, instead of borrowing the target's.
        own_head (`bool`, *optional*, defaults to `False`):
            Whether the checkpoint holds the output head, instead of borrowing the target's.
        draft_vocab_size (`int`, *optional*):
            Rows of a head that knows only a part of the target's tokens. The checkpoint then holds `d2t`: draft token
            i is the target's token `i + d2t[i]`. Needs `own_head`.
        markov_rank (`int`, *optional*, defaults to `0`):
            Rank of DSpark's Markov head, which adds to the logits a bias that depends on the token before. 0: no head.
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`):
            `"vanilla"`, `"gated"` or `"rnn"`.
        confidence_head (`bool`, *optional*, defaults to `False`):
            Whether the checkpoint predicts how likely the draft is accepted at each position (DSpark).
        confidence_head_with_markov (`bool`, *optional*, defaults to `False`):
            Whether the confidence head also reads the Markov head's embedding of the token before.
        confidence_threshold (`float`, *optional*):
            A node whose confidence is lower gets no children. By default confidence is not read.
        conv_kernel_size (`int`, *optional*, defaults to `0`):
            Slots a dynamic convolution of DFlash2 reads, around each attention and MLP. 0: no convolutions.
        conv_group_size (`int`, *optional*, defaults to `16`):
            Channels that share a dynamic weight of these convolutions.
        selector_rank (`int`, *optional*, defaults to `0`):
            Rank of DFlash2's candidate selector, which scores pairs of neighbouring tokens. 0: no selector.
        selector_top_k (`int`, *optional*, defaults to `16`):
            Candidates of a position that the selector chooses from.

    Raises:
        ValueError: for a missing or contradictory field; the message names the field and its values.
    """

    model_type = "dflash"
    default_theta = 10000.0

    # Fields whose default is derived in `__post_init__` are declared with the type they have after it.
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = None  # type: ignore[assignment]
    attention_bias: bool = False
    layer_types: list[str] = None  # type: ignore[assignment]
    sliding_window: int | None = None
    inclusive_window: bool = False
    causal_layers: list[bool] = None  # type: ignore[assignment]
    block_size: int = 16
    mask_token_id: int = None  # type: ignore[assignment]
    target_layer_ids: list[int] = None  # type: ignore[assignment]
    num_target_layers: int | None = None
    target_hidden_size: int = None  # type: ignore[assignment]
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    final_logit_softcapping: float | None = None
    sample_from_anchor: bool = False
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = None
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    confidence_head: bool = False
    confidence_head_with_markov: bool = False
    confidence_threshold: float | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.causal_layers is None:
            self.causal_layers = [False] * self.num_hidden_layers
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": self.default_theta}
        super().__post_init__(**kwargs)

    @property
    def first_draft_slot(self) -> int:
        """`int`: the slot that predicts the token after the anchor."""
        return 0 if self.sample_from_anchor else 1

    @property
    def draft_depth(self) -> int:
        """`int`: tokens a pass drafts."""
        return self.block_size - self.first_draft_slot

    def check(self) -> None:
        """Raises `ValueError` unless a drafter can be built from this configuration."""
        if not self.target_layer_ids:
            raise ValueError(
                "The drafter's configuration has no `target_layer_ids`, so which target layers to tap is unknown. "
                "Add the list the checkpoint was trained with to its `dflash_config`."
            )
        if min(self.target_layer_ids) < 0:
            raise ValueError(
                f"`target_layer_ids` are {self.target_layer_ids}, but must be indices of decoder layers from 0: the "
                "target's embedding cannot be tapped."
            )
        if self.mask_token_id is None:
            raise ValueError("The drafter's configuration has no `mask_token_id`; add it to its `dflash_config`.")
        if self.draft_depth < 1:
            raise ValueError(f"`block_size` counts the anchor, so it must be at least 2, but it is {self.block_size}.")
        for name in ("layer_types", "causal_layers"):
            length = len(getattr(self, name))
            if length != self.num_hidden_layers:
                raise ValueError(f"`{name}` has {length} entries but the drafter has {self.num_hidden_layers} layers.")
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError("`layer_types` names sliding layers but `sliding_window` is not set.")
        if self.draft_vocab_size is not None and not (self.own_head and self.draft_vocab_size <= self.vocab_size):
            raise ValueError(
                f"`draft_vocab_size={self.draft_vocab_size}` means a head of the drafter's own over a part of the "
                f"target's {self.vocab_size} tokens, but `own_head={self.own_head}`."
            )
        check_heads(self)
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"RoPE type {rope_type!r} is not supported in a drafter; supported: {', '.join(ROPE_TYPES)}."
            )
        if max(self.target_layer_ids) >= (self.num_target_layers or max(self.target_layer_ids) + 1):
            raise ValueError(
                f"`target_layer_ids` {self.target_layer_ids} reach beyond the target's {self.num_target_layers} "
                "layers."
            )

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Any:
        """As the parent, for which a missing file is an empty one."""
        raw, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not raw:
            raise OSError(f"{pretrained_model_name_or_path} has no `config.json`, which tells what drafter it holds.")
        return raw, kwargs

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Any:
        """Reads a checkpoint's `config.json` in any supported layout.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): a folder, or a repository of the Hub.
            kwargs: Hub options (`revision`, `subfolder`, `token`, `cache_dir`, `local_files_only`) and overrides.

        Raises:
            ValueError: if the layout is unknown or of an unsupported family.
            OSError: if there is no `config.json`.
        """
        from hf_ddtree.drafters.formats import detect

        raw, kwargs = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
        fields = detect(raw).convert(raw)
        return_unused = kwargs.pop("return_unused_kwargs", False)
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in cls.__dataclass_fields__}
        config = cls(**{**fields, **overrides})
        config.check()
        return (config, kwargs) if return_unused else config

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Writes `config.json` in the z-lab layout, or in that of its relative with the drafter's head."""
        from hf_ddtree.drafters.formats.exporting import export

        if push_to_hub:
            raise ValueError("Save to a folder first, then upload it with `huggingface_hub.upload_folder`.")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(export(self), indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
