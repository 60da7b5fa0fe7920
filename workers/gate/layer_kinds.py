"""Which kinds of layers a configuration tells of, and how many layers show all of them."""

import re
from collections.abc import Mapping
from typing import Any

MIN_LAYERS = 3
MAX_KINDS = 4  # of layers; a list of more values is of sizes

TOKEN_IDS = re.compile(r"_token_(id|index)$")
# By which classes make lists of layer kinds where their configuration brings none.
PERIODS = re.compile(r"(_period|_interval|_every_n_layers|_window_pattern|_step|layer_group_size)$")


def num_layers(values: Mapping[str, Any], of_layers: int) -> int:
    """The fewest first layers that show every kind of layer."""
    if stack := values.get("num_layers_per_stack"):
        return of_layers // int(stack)  # one layer in each stack
    kinds = [each for name, value in values.items() if (each := _kinds(name, value, of_layers))]
    by_layer = list(zip(*kinds, strict=True))
    periods = [v for name, v in values.items() if PERIODS.search(name) and is_count(v)]
    shown = [by_layer.index(kind) + 1 for kind in set(by_layer)]
    shown += [period for period in periods if period <= of_layers]
    layers = min(max([MIN_LAYERS, *shown]), of_layers)
    # Each kind once with keys of its own, and once with those of an earlier layer.
    return min(2 * layers, of_layers) if values.get("num_kv_shared_layers") else layers


def _kinds(name: str, value: Any, of_layers: int) -> list[str]:
    """What a value tells of each layer; [] where it tells of none, or of each something else."""
    kinds: list[str] = []
    if name == "per_layer_config" and isinstance(value, dict):
        own = {int(layer): str(each) for layer, each in value.items()}
        kinds = [own.get(layer, "") for layer in range(of_layers)]
    elif not isinstance(value, list) or TOKEN_IDS.search(name):
        pass
    elif value and are_indices(value) and value[-1] < of_layers:
        kinds = [str(layer in value) for layer in range(of_layers)]
    elif len(value) == of_layers:
        kinds = list(map(str, value))
    return kinds if len(set(kinds)) <= MAX_KINDS else []


def are_indices(value: list[Any]) -> bool:
    """Whether a list names layers by number."""
    return all(isinstance(each, int) for each in value) and value == sorted(set(value))


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
