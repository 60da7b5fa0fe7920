"""A process that tries grammars before the driver compiles them.

A grammar can overflow the stack of llguidance's compiler or ask for more memory than there is,
and either would end the process. Here that costs nothing. Run as `python -m
runtime.grammar.vetting LIMITS`; a line of standard input is a grammar and its kind, a JSON
list, a line of standard output what is wrong with it, "" for nothing.

Grammars meet a vocabulary of the 256 bytes here, which the depth of recursion doesn't depend on,
and a stack much smaller than that of any thread that will see them.
"""

import json
import math
import random
import resource
import signal
import sys
import threading

from runtime.grammar.limits import GrammarLimits, parser_limits
from runtime.structure import StructureKind

STACK_BYTES = 2**20  # Rust's threads, which make masks, have 2 MiB; Python's, mostly 8
NUM_WALK_STEPS = 16  # enough for the rows of the first properties of an object


def vet(source: str, kind: StructureKind, limits: GrammarLimits) -> str:
    """Compiles `source` and writes a few random bytes by it. What went wrong, or ""."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer, of_kind = LLTokenizer("byte"), parser_limits(limits, kind)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=of_kind)
    draw = random.Random(0)
    for _ in range(NUM_WALK_STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if matcher.is_error() or not allowed or not matcher.consume_token(draw.choice(allowed)):
            break
    return matcher.get_error()


def serve(limits: GrammarLimits) -> None:
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        # The driver kills us sooner, unless it is gone.
        signal.alarm(math.ceil(2 * limits.timeout_s))
        source, kind = json.loads(line)
        print(json.dumps(vet(source, kind, limits)), flush=True)
        signal.alarm(0)


def main() -> None:
    limits = GrammarLimits(**json.loads(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (limits.max_memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(limits,), name="vet")
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
