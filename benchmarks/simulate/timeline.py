"""What a replica was like during each of its steps."""

from array import array

from runtime.request import EngineStats


class Timeline:
    """One entry a step: when it began, how long it took, what was in use meanwhile."""

    def __init__(self) -> None:
        self.start_s = array("d")
        self.seconds = array("d")
        self.occupancy = array("d")  # share of the blocks that sequences hold
        self.running = array("l")
        self.waiting = array("l")

    def add(self, start_s: float, seconds: float, stats: EngineStats) -> None:
        self.start_s.append(start_s)
        self.seconds.append(seconds)
        self.occupancy.append(1 - stats.num_free_blocks / stats.num_blocks)
        self.running.append(stats.num_running)
        self.waiting.append(stats.num_waiting)

    @property
    def end_s(self) -> float:
        """When the last step ended."""
        return self.start_s[-1] + self.seconds[-1] if self.start_s else 0.0

    @property
    def busy_s(self) -> float:
        return sum(self.seconds)

    @property
    def occupied_s(self) -> float:
        """Occupancy, integrated over the steps."""
        pairs = zip(self.seconds, self.occupancy, strict=True)
        return sum(seconds * occupancy for seconds, occupancy in pairs)

    @property
    def max_occupancy(self) -> float:
        return max(self.occupancy, default=0.0)

    @property
    def max_running(self) -> int:
        return max(self.running, default=0)

    @property
    def max_waiting(self) -> int:
        return max(self.waiting, default=0)
