"""What the package asks of Transformers and PyTorch in its own way gives what theirs gives."""

from torch import nn

from hf_ddtree.compat import all_modules
from pairs import make_target


def test_all_modules_once_each() -> None:
    target = make_target()
    target.model.layers[1].mlp = target.model.layers[0].mlp
    target.register_module("empty", None)
    target.add_module("nothing", nn.ModuleList())
    assert sorted(map(id, all_modules(target))) == sorted(map(id, target.modules()))
