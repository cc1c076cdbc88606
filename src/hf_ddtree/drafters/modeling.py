"""The DFlash drafter: a small transformer that reads the target's hidden states and denoises a block in one pass."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, eager_attention_forward, rotate_half

from hf_ddtree.compat import ALL_ATTENTION_FUNCTIONS, CACHE_NAME, attention_implementation
from hf_ddtree.drafters.configuration import DFlashConfig
from hf_ddtree.drafters.heads import (
    CandidateSelector,
    ConfidenceHead,
    GroupedConvolution,
    around,
    build_markov_head,
)


class DFlashRMSNorm(nn.Module):
    """Root-mean-square norm with a plain weight, never `1 + weight`, whatever the target uses."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(states, (states.shape[-1],), self.weight, self.eps)


class DFlashRotaryEmbedding(nn.Module):
    """Cosines and sines of absolute positions; the frequencies are no buffer, so a cast to bf16 leaves them fp32."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.config = config
        self._frequencies: dict[torch.device, tuple[torch.Tensor, float]] = {}

    def frequencies(self, device: torch.device) -> tuple[torch.Tensor, float]:
        if device not in self._frequencies:
            rope = self.config.rope_parameters
            if rope["rope_type"] == "default":
                exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=device)
                self._frequencies[device] = rope["rope_theta"] ** (-exponents / self.config.head_dim), 1.0
            else:
                self._frequencies[device] = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, device)
        return self._frequencies[device]

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`(batch, length)` positions to cosines and sines of shape `(batch, 1, length, head_dim)`."""
        frequencies, scale = self.frequencies(position_ids.device)
        angles = position_ids[:, None, :, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


class DFlashAttention(nn.Module):
    """Queries from the block's slots; keys and values from the context and the slots, normalised per head."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.is_causal = self.head_dim**-0.5, False
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DFlashRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        slots: torch.Tensor,
        context: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        batch, length, _ = slots.shape
        sources = torch.cat([context, slots], dim=1)
        query = self.q_norm(self.q_proj(slots).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(sources).view(batch, sources.shape[1], -1, self.head_dim)).transpose(1, 2)
        value = self.v_proj(sources).view(batch, sources.shape[1], -1, self.head_dim).transpose(1, 2)
        cos, sin = rotary
        query = query * cos[:, :, -length:] + rotate_half(query) * sin[:, :, -length:]
        key = key * cos + rotate_half(key) * sin
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention_implementation(self.config), eager_attention_forward)
        output, _ = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, is_causal=False, **kwargs
        )
        return self.o_proj(output.reshape(batch, length, -1))


class DFlashLayer(nn.Module):
    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = GroupedConvolution(config) if config.conv_kernel_size else None
        self.mlp_conv = GroupedConvolution(config) if config.conv_kernel_size else None

    def forward(self, slots: torch.Tensor, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        def attend(inputs: torch.Tensor) -> torch.Tensor:
            return self.self_attn(inputs, context, *args, **kwargs)

        slots = slots + around(self.attention_conv, self.input_layernorm(slots), attend)
        return slots + around(self.mlp_conv, self.post_attention_layernorm(slots), self.mlp)


class DFlashModel(PreTrainedModel):
    r"""
    A block-diffusion drafter (DFlash, hf.co/papers/2602.06036), with the call signature of Transformers' native DFlash
    assistants, so that it drafts trees here and, if it is a plain one, chains under the native
    `speculation_type="dflash"`.

    Embedding and head come from the target, unless the checkpoint holds its own (`embed_tokens`, `lm_head`, and for a
    reduced vocabulary the offsets `d2t`); `TargetIO` uses whichever there is. DFlash's relatives are the same model
    with more in it: DSpark a `markov_head` and perhaps a `confidence_head`, DFlash2 a `candidate_selector` and a
    convolution around each attention and MLP. Load one with [`DFlashModel.from_pretrained`], from a repository of the
    Hub or a folder, without remote code.
    """

    config_class = DFlashConfig
    config: DFlashConfig
    main_input_name = "noise_embeds"
    base_model_prefix = ""
    _no_split_modules: ClassVar[list[str]] = ["DFlashLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # Left in the file without a word; `loading` refuses them in a layout that does not know them.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^t2d$", r"^verifier_(lm_head|norm)\."]

    def __init__(self, config: DFlashConfig):
        config.check()
        super().__init__(config)
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DFlashLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        head_rows = config.draft_vocab_size or config.vocab_size
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, head_rows, bias=False)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(head_rows, dtype=torch.long))
        # Path-conditioned heads take no part in the pass: a tree builder asks them through `path_scorer`.
        self.markov_head = build_markov_head(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.post_init()

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        r"""
        Args:
            noise_embeds (`torch.Tensor` of shape `(batch, slots, hidden_size)`):
                Target embeddings of the anchor and of the masks.
            context_hidden_states (`torch.Tensor` of shape `(batch, new, taps * target_hidden_size)`):
                Tapped hidden states of the target's tokens accepted since the last call, taps side by side.
            attention_mask (`torch.Tensor`, *optional*):
                `(batch, cached + new + slots)` with 0 for padding, or a 4D mask that is used as it is.
            position_ids (`torch.Tensor` of shape `(batch, new + slots)`, *optional*):
                Absolute positions. Defaults to the positions after the cached ones.
            cache (`Cache`, *optional*):
                Context keys and values. It also takes the slots' own, which the caller crops after the call.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` of shape `(batch, slots, hidden_size)`.
        """
        cache = cache if cache is not None else past_key_values
        context = self.hidden_norm(self.fc(context_hidden_states))
        slots, new = noise_embeds.shape[1], context.shape[1]
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(seen, seen + new + slots, device=noise_embeds.device)[None]
        rotary = self.rotary_emb(position_ids, noise_embeds.dtype)
        masks = [self._mask(i, slots, new, attention_mask, cache, noise_embeds) for i in range(len(self.layers))]
        hidden_states = noise_embeds
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden_states = layer(hidden_states, context, rotary, mask, cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE_NAME: cache})

    def _mask(
        self,
        layer_idx: int,
        slots: int,
        new: int,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        like: torch.Tensor,
    ) -> torch.Tensor | None:
        """The additive mask of one layer, `(batch, 1, slots, keys)`, or `None` where every slot sees every key."""
        if attention_mask is not None and attention_mask.dim() == 4:
            return attention_mask
        length, offset = new + slots, 0
        if cache is not None and layer_idx < len(cache.layers):
            length, offset = cache.layers[layer_idx].get_mask_sizes(new + slots)
        config = self.config
        window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        causal = config.causal_layers[layer_idx]
        if attention_mask is None and not causal and (window is None or length <= window):
            return None
        keys = torch.arange(offset, offset + length, device=like.device)
        distance = keys[-slots:, None] - keys[None]
        visible = torch.ones_like(distance, dtype=torch.bool) if not causal else distance >= 0
        if window is not None:
            visible &= distance.abs() < window + config.inclusive_window
        visible = visible[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, offset : offset + length].bool()
        lowest = torch.finfo(like.dtype).min
        return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, lowest)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> "DFlashModel":
        r"""
        Loads a drafter in any of the published layouts (docs/drafters.md), or from a folder `save_pretrained` wrote.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): a repository of the Hub, or a folder.
            kwargs: those of [`~transformers.PreTrainedModel.from_pretrained`], such as `dtype` and `device_map`.

        Raises:
            ValueError: for an unsupported family or layout, quantised or pickled weights, and missing or unknown ones,
                which are named.
            OSError: if there are no safetensors files.
        """
        from hf_ddtree.drafters.loading import load

        return load(cls, super().from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        r"""
        Writes `config.json` and the weights in the z-lab layout, whatever layout they were loaded from.

        Args:
            save_directory (`str` or `os.PathLike`): the folder.
            kwargs: those of [`~transformers.PreTrainedModel.save_pretrained`].
        """
        # By default the library gives the weights back the names of the checkpoint they came from.
        super().save_pretrained(save_directory, **{**kwargs, "save_original_format": False})
