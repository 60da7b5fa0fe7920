"""What befalls workers: its kinds, in which order they come, and how each is done."""

import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from benchmarks.chaos.server import TP, Server
from workers.faults import Fault, put_fault

Kind = Literal[
    "kill", "kill-starting", "stop", "late", "slow", "raise", "raise-again", "raylet", "network"
]

KINDS: tuple[Kind, ...] = get_args(Kind)
# Of one node's Ray, and of a network between nodes.
BETWEEN_NODES: tuple[Kind, ...] = ("raylet", "network")
# Nothing ends, somebody is silent.
HANGS: tuple[Kind, ...] = ("stop", "late", "network")
# Past any deadline that steps of milliseconds have, and short of each.
LATE_S, SLOW_S = 120.0, 2.0
# What is to be noticed at once, and what is noticed by a silence: so much after its deadline.
AT_ONCE_S, AFTER_DEADLINE_S = 5.0, 2.0
MEANINGS = {
    "kill": "SIGKILL of a rank's process: with Ray, its worker process",
    "kill-starting": "the same, and once more while the next workers start",
    "stop": "SIGSTOP of a rank's process",
    "late": f"a rank answers {LATE_S:g} s late, past each deadline",
    "slow": f"a rank answers {SLOW_S:g} s late: to be waited for",
    "raise": "a rank raises in its forward pass",
    "raise-again": "the same, and once more in the first step of the next workers",
    "raylet": "SIGKILL of the other node's raylet",
    "network": "the network between the nodes is cut",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which fault comes, and after how long."""

    kind: Kind
    rank: int
    pause_s: float  # after the last recovery
    again_s: float  # from the loss to the second blow at those that start


def plan_faults(kinds: Sequence[Kind], seed: int) -> Iterator[Plan]:
    """Without end; each kind as often as the others, in random order."""
    draw = random.Random(seed)
    while True:
        for kind in draw.sample(kinds, len(kinds)):
            yield Plan(
                kind=kind,
                rank=draw.randrange(TP),
                pause_s=draw.uniform(1.0, 4.0),
                again_s=draw.uniform(0.2, 8.0),
            )


def ends_epoch(kind: Kind) -> bool:
    return kind != "slow"


def inflict(plan: Plan, server: Server, folder: Path) -> str:
    """Returns to whom. Raises RuntimeError: there is nobody that it could befall."""
    match plan.kind:
        case "kill" | "kill-starting":
            return _send(server, plan.rank, signal.SIGKILL)
        case "stop":
            return _send(server, plan.rank, signal.SIGSTOP)
        case "late" | "slow":
            seconds = LATE_S if plan.kind == "late" else SLOW_S
            put_fault(folder, plan.rank, Fault(kind="late", seconds=seconds))
        case "raise" | "raise-again":
            put_fault(folder, plan.rank, Fault(kind="raise"))
        case "raylet":
            server.place.kill_raylet()
            return "the other node"
        case "network":
            server.place.cut()
            return "the other node"
    return f"rank {plan.rank}"


def kill_starting(server: Server) -> str:
    """Kills one that starts; returns which, "nobody" where none has begun to."""
    starting = server.starting()
    if not starting:
        return "nobody"
    starting[-1].kill()
    return f"process {starting[-1].pid}"


def _send(server: Server, rank: int, number: signal.Signals) -> str:
    ranks = server.ranks()
    if len(ranks) != TP:
        raise RuntimeError(f"{len(ranks)} processes hold a rank, must be {TP}")
    ranks[rank].send_signal(number)
    return f"rank {rank}"
