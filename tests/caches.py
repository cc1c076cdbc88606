"""Filling caches and comparing them with the library's own."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_ddtree.compat import CACHE_NAME


def assert_same_cache(cache: Any, expected: Any) -> None:
    """Row for row; of a layer of fixed length the slots in use."""
    assert len(cache.layers) == len(expected.layers)
    compared = 0
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        if not isinstance(theirs, CacheLayerMixin):
            continue
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length())
        rows = min(int(theirs.get_seq_length()), theirs.keys.shape[-2])
        for name in ("keys", "values"):
            expected_rows = getattr(theirs, name)[:, :, :rows]
            scale = max(1.0, float(expected_rows.abs().max()))
            torch.testing.assert_close(getattr(ours, name)[:, :, :rows], expected_rows, rtol=0, atol=2e-5 * scale)
        compared += rows
    assert compared


def read(target: Any, ids: torch.Tensor, cache: Any, chunk: int = 1000) -> None:
    """Forwards of `target` over `ids`, at most `chunk` tokens each."""
    for tokens in ids.split(chunk, dim=1):
        with torch.no_grad():
            target(tokens, use_cache=True, **{CACHE_NAME: cache})
