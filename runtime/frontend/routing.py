"""Which of several engines gets a request.

Pure: loads and a source of randomness are brought. Loads are those that one frontend knows, of its
own requests.
"""

import random
from array import array
from collections.abc import Mapping
from hashlib import blake2b

from runtime.frontend_config import Routing
from runtime.request import Request

# What requests have in common beyond these, such as the turns of a chat, finds its engine again;
# what they have in common before, such as a short system prompt, doesn't bring them all to one.
PREFIX_TOKENS = 128
# An engine with more than so many times the requests that engines have on average, and some on top,
# is passed by: consistent hashing with bounded loads (Mirrokni et al., 2016).
MAX_LOAD_RATIO = 1.25
SLACK_REQUESTS = 8


def choose(
    routing: Routing, loads: Mapping[str, int], request: Request, source: random.Random
) -> str:
    """The address of one of the engines, whose requests are counted in `loads`; there is one."""
    if len(loads) == 1:
        return next(iter(loads))
    match routing:
        case "least_requests":
            return min(loads, key=loads.__getitem__)
        case "two_choices":
            return min(source.sample([*loads], 2), key=loads.__getitem__)
        case "prefix":
            return _by_prefix(loads, prefix_key(request))


def prefix_key(request: Request) -> bytes:
    """The same for requests that begin alike and may share cached blocks."""
    first = array("Q", request.prompt_token_ids[:PREFIX_TOKENS]).tobytes()
    return _hash(_hash(request.cache_salt.encode()) + first)


def _by_prefix(loads: Mapping[str, int], key: bytes) -> str:
    """The first in the key's own order of engines that isn't loaded well above the others.

    The order is by rendezvous hashing: the same in every frontend, and an engine that comes or goes
    moves the keys that are its own, and no others.
    """
    most = MAX_LOAD_RATIO * sum(loads.values()) / len(loads) + SLACK_REQUESTS
    order = sorted(loads, key=lambda address: _hash(key + address.encode()))
    return next(each for each in order if loads[each] <= most)


def _hash(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()
