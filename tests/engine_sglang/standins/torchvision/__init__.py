"""The real torchvision, made importable beside a build of torch that its compiled operators do not fit.

SGLang imports torchvision for image models. Its wheel registers shape functions for two operators that its own library
would define; that library is built for CUDA. So the two are declared here, without code: calling them fails.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent.parent

_operators = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_real = PathFinder.find_spec("torchvision", [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE])
assert _real is not None and _real.loader is not None and _real.submodule_search_locations is not None
__file__ = _real.origin
__path__ = list(_real.submodule_search_locations)
__spec__ = _real
_real.loader.exec_module(sys.modules[__name__])
