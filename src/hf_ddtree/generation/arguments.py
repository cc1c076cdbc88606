"""The arguments of a sequence's forwards, as `generate` keeps them, brought up to date when they are read."""

from typing import Any

from transformers import PreTrainedModel

from hf_ddtree.compat import extend_model_kwargs, extends_by_length


class SequenceArguments:
    """`generate`'s `model_kwargs`, whose positions and masks are as long as the sequence.

    Extending them copies each, while a round without a draft needs the last position alone: where an extension depends
    on the number of tokens only, it waits for a round that reads them.

    Args:
        model (`PreTrainedModel`): the model they are for.
        model_kwargs (`dict`): the decoding method's.
    """

    def __init__(self, model: PreTrainedModel, model_kwargs: dict[str, Any]):
        self.model, self.kept = model, model_kwargs
        #: Tokens at the sequence's end that `kept` does not cover.
        self.missing = 0
        self._may_wait = extends_by_length(model, model_kwargs)

    def read(self) -> dict[str, Any]:
        """The `model_kwargs` of the whole sequence."""
        if self.missing:
            self.kept = extend_model_kwargs(self.model, {}, self.kept, self.missing)
            self.missing = 0
        return self.kept

    def extend(self, outputs: Any, new: int) -> None:
        """Notes `new` tokens, which the target chose in `outputs`."""
        if self._may_wait:
            self.missing += new
        else:
            self.kept = extend_model_kwargs(self.model, outputs, self.kept, new)
