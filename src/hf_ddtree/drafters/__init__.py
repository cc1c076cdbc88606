"""DFlash drafters: configuration, model, loading, and what they need of their target."""

from typing import TYPE_CHECKING, Any

from hf_ddtree.drafters.borrowing import device_of, embedding_shape, head_shape, is_sharded, plain_weight
from hf_ddtree.drafters.configuration import DFlashConfig
from hf_ddtree.drafters.io import TargetIO
from hf_ddtree.drafters.native_chain import check_native_chain

if TYPE_CHECKING:
    from hf_ddtree.drafters.modeling import DFlashModel

__all__ = [
    "DFlashConfig",
    "DFlashModel",
    "TargetIO",
    "check_native_chain",
    "device_of",
    "embedding_shape",
    "head_shape",
    "is_sharded",
    "plain_weight",
]


def __getattr__(name: str) -> Any:
    # The model pulls in a modeling file of Transformers, which `import hf_ddtree` must not pay for.
    if name == "DFlashModel":
        from hf_ddtree.drafters.modeling import DFlashModel

        return DFlashModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
