"""Inflicts a fault on a server under load, and sees what it does about it."""

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos.client import status_of
from benchmarks.chaos.engine_log import LOOK_S, Event
from benchmarks.chaos.faults import (
    AFTER_DEADLINE_S,
    AT_ONCE_S,
    BETWEEN_NODES,
    HANGS,
    SLOW_S,
    Kind,
    Plan,
    ends_epoch,
    inflict,
    kill_starting,
)
from benchmarks.chaos.findings import Finding
from benchmarks.chaos.load import Load
from benchmarks.chaos.server import Server
from runtime.config import EngineConfig
from workers.faults import Fault, put_fault

# Far past all that is promised: what takes longer is given up.
DETECTION_S, RECOVERY_S = 400.0, 180.0
READINESS_S = 3.0
# In which nothing happens, where nothing should.
CALM_S = 1.5
DEADLINE = re.compile(r"within ([0-9.e+]+) s|silent for ([0-9.e+]+) s")
# These may strike once more as workers come back.
TWICE: tuple[Kind, ...] = ("kill-starting", "raise-again")
OK, UNAVAILABLE = 200, 503


class Observer:
    """For one event loop. `folder` is where the server's workers look for faults."""

    def __init__(self, server: Server, load: Load, folder: Path, *, began: float) -> None:
        self._server = server
        self._load = load
        self._folder = folder
        self._began = began
        self._num_seen = 0  # events of the log

    async def befall(self, number: int, plan: Plan) -> Finding:
        """Returns when requests run again. Raises RuntimeError: they never do."""
        if plan.kind in BETWEEN_NODES:
            await self._spread()
        complaints = [f"an epoch ended before: {each.message}" for each in self._unexpected()]
        at = time.time()
        victim = inflict(plan, self._server, self._folder)
        finding = Finding(number=number, kind=plan.kind, victim=victim, at_s=at - self._began)
        see = self._see_loss if ends_epoch(plan.kind) else self._see_nothing
        finding = await see(finding, plan, at, complaints)
        for each in self._folder.iterdir():  # that no step has taken
            each.unlink()
        await asyncio.to_thread(self._server.place.restore)
        self._num_seen = len(self._server.log.events)
        return replace(finding, complaints=tuple(complaints))

    def _unexpected(self) -> list[Event]:
        return [each for each in self._server.log.events[self._num_seen :] if each.kind == "lost"]

    async def _spread(self) -> None:
        """Has ranks on both nodes: after a node was away they are on one."""
        if self._server.place.has_spread():
            return
        inflict(Plan(kind="kill", rank=0, pause_s=0.0, again_s=0.0), self._server, self._folder)
        log = self._server.log
        for kind in ("lost", "back"):
            if await log.wait_for(kind, after=self._num_seen, timeout_s=RECOVERY_S) is None:
                raise RuntimeError(f"a killed rank wasn't {kind} within {RECOVERY_S:g} s")
        await self._load.next_tokens()
        self._num_seen = len(log.events)
        if not self._server.place.has_spread():
            raise RuntimeError("the other node got no rank, though it is there")

    async def _see_loss(
        self, finding: Finding, plan: Plan, at: float, complaints: list[str]
    ) -> Finding:
        log = self._server.log
        lost = await log.wait_for("lost", after=self._num_seen, timeout_s=DETECTION_S)
        if lost is None:
            raise RuntimeError(f"{finding.kind} of {finding.victim} wasn't noticed: {finding}")
        detection_s, limit_s = lost.at - at, limit_of(plan.kind, lost.message)
        if detection_s > limit_s:
            complaints.append(f"noticed after {detection_s:.2f} s, must be {limit_s:g} s at most")
        if await self._wait_status("/ready", UNAVAILABLE) is None:
            complaints.append(f"/ready wasn't {UNAVAILABLE} while there were no workers")
        if await status_of(self._server.target, "/health") != OK:
            complaints.append(f"/health wasn't {OK} while there were no workers")
        victim = finding.victim + await self._strike_again(plan)
        back = await self._wait_back()
        if plan.kind in TWICE:
            await asyncio.sleep(CALM_S)
            back = await self._wait_back()
        tokens_at = await self._load.next_tokens()
        ready_at = await self._wait_status("/ready", OK)
        if ready_at is None:
            complaints.append(f"/ready wasn't {OK} after {back.message!r}")
        return replace(
            finding,
            victim=victim,
            detection_s=detection_s,
            limit_s=limit_s,
            ready_s=None if ready_at is None else ready_at - at,
            recovery_s=tokens_at - at,
            cause=lost.message,
        )

    async def _see_nothing(
        self, finding: Finding, plan: Plan, at: float, complaints: list[str]
    ) -> Finding:
        await asyncio.sleep(SLOW_S + CALM_S)
        for each in self._unexpected():
            complaints.append(f"an epoch ended that should have gone on: {each.message}")
            await self._wait_back()
        return finding

    async def _strike_again(self, plan: Plan) -> str:
        """Returns whom else it befell."""
        log, num_seen = self._server.log, len(self._server.log.events)
        if plan.kind == "raise-again":
            put_fault(self._folder, plan.rank, Fault(kind="raise"))
            if await log.wait_for("lost", after=num_seen, timeout_s=RECOVERY_S) is None:
                raise RuntimeError(f"{plan.kind}: the next workers have run no step")
            return " twice"
        if plan.kind != "kill-starting":
            return ""
        if await log.wait_for("back", after=num_seen, timeout_s=plan.again_s) is not None:
            return ", nobody: the next workers were quicker"
        return f", {kill_starting(self._server)}"

    async def _wait_back(self) -> Event:
        """The workers are there, and weren't lost since."""
        deadline = time.monotonic() + RECOVERY_S
        log = self._server.log
        while True:
            last = log.events[-1]
            if last.kind == "back":
                return last
            left = deadline - time.monotonic()
            if await log.wait_for("back", after=len(log.events), timeout_s=left) is None:
                raise RuntimeError(f"no workers within {RECOVERY_S:g} s after: {last.message}")

    async def _wait_status(self, path: str, wanted: int) -> float | None:
        """When it was so, as `time.time` tells; None: it wasn't within READINESS_S."""
        deadline = time.monotonic() + READINESS_S
        while await status_of(self._server.target, path) != wanted:
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(LOOK_S)
        return time.time()


def limit_of(kind: Kind, cause: str) -> float:
    """How soon it is to be noticed: at once, or a while after the deadline of what is silent."""
    if kind not in HANGS:
        return AT_ONCE_S
    found = DEADLINE.search(cause)
    # By pings, which are quicker, or by a heartbeat.
    deadline_s = EngineConfig().lease_s if found is None else float(found[1] or found[2])
    return deadline_s + AFTER_DEADLINE_S
