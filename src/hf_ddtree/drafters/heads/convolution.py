"""DFlash2's dynamic depthwise convolution over the slots of a block."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IN, OUT = 0, 1


class GroupedConvolution(nn.Module):
    """
    Convolves what goes into a sublayer and what comes out of it, with weights that the slot itself determines.

    A slot reads itself and the slots before it in its block: `y[t] = sum_o (base[o] + dynamic[t, o]) * x[t - o]`, x
    being 0 before the block. `base` is one weight a channel; `dynamic` one a group of channels, and projected from the
    sublayer's input for both sides at once. The context does not pass through it.

    Args:
        config ([`DFlashConfig`]): read for `hidden_size`, `conv_kernel_size` and `conv_group_size`.
    """

    def __init__(self, config: Any):
        super().__init__()
        size, taps = config.hidden_size, config.conv_kernel_size
        self.taps, self.groups, self.group_size = taps, size // config.conv_group_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.base_kernel.data[:, 0] = 1.0
        self.kernel_projection = nn.Linear(size, 2 * taps * self.groups, bias=False)

    def forward(self, inputs: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`(batch, slots, hidden_size)` to the convolved output of `sublayer`, of the same shape."""
        dynamic = self.kernel_projection(inputs).unflatten(-1, (2, self.taps, self.groups))
        outputs = sublayer(self._convolve(inputs, dynamic[:, :, IN], IN))
        return self._convolve(outputs, dynamic[:, :, OUT], OUT)

    def _convolve(self, states: torch.Tensor, dynamic: torch.Tensor, side: int) -> torch.Tensor:
        slots = states.shape[1]
        padded = F.pad(states, (0, 0, self.taps - 1, 0))
        result = torch.zeros_like(states)
        for offset in range(self.taps):
            start = self.taps - 1 - offset
            weight = self.base_kernel[side, offset] + dynamic[:, :, offset].repeat_interleave(self.group_size, dim=-1)
            result = result + weight * padded[:, start : start + slots]
        return result


def around(
    convolution: GroupedConvolution | None, inputs: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The sublayer inside its convolution, or alone where the drafter has none."""
    return sublayer(inputs) if convolution is None else convolution(inputs, sublayer)
