"""Forwards of modules that stay whole in their code while their parameters are a rank's part."""

from collections.abc import Callable
from typing import Any

import torch

from workers.parallel import TensorParallel


class SummedForward:
    """Stands for the forward of a module whose outputs are a rank's part of a sum."""

    def __init__(self, forward: Callable[..., Any], parallel: TensorParallel) -> None:
        self._forward = forward
        self._parallel = parallel

    def __call__(self, *arguments: object, **keywords: object) -> torch.Tensor:
        return self._parallel.all_reduce(self._forward(*arguments, **keywords).contiguous())


class DividedForward:
    """Stands for the forward of a module that every rank runs whole, within a sum over ranks."""

    def __init__(self, forward: Callable[..., Any], parallel: TensorParallel) -> None:
        self._forward = forward
        self._size = parallel.size

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._forward(inputs)
        return output / self._size
