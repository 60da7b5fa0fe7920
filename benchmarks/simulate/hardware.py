"""What a rank runs on: memory, bandwidth, arithmetic, and the link to the other ranks.

Figures are the makers' datasheets', per GPU, in decimal units; bf16 without sparsity (datasheets
print twice as much), links per direction (datasheets print both directions together):

- H200, H100: NVIDIA H200 and H100 Tensor Core GPU datasheets, the SXM columns; NVLink 4.
- A100: NVIDIA A100 Tensor Core GPU datasheet, the 80 GB SXM column; NVLink 3.
- L40S: NVIDIA L40S datasheet; it has no NVLink, so the link is PCIe 4.0 x16.
- B200: NVIDIA DGX B200 datasheet divided by its 8 GPUs, dense bf16 of the HGX B200; NVLink 5.

`link_latency_s` is no datasheet's: it is what a small all-reduce between ranks of one machine
takes, rounded up, over NVLink and over PCIe.
"""

from dataclasses import dataclass

from runtime.config import require

NVLINK_ALL_REDUCE_S = 10e-6
PCIE_ALL_REDUCE_S = 30e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's hardware. A device without a link runs alone."""

    name: str
    memory_bytes: int
    bandwidth: float  # bytes/s between memory and arithmetic
    flops: float  # multiplications and additions a second, in the model's number format
    link_bandwidth: float = 0.0  # bytes/s to other ranks, one direction
    link_latency_s: float = 0.0  # of one small all-reduce

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bandwidth", "flops"):
            value = getattr(self, name)
            require(value > 0, f"{name}={value} of {self.name} must be more than 0")


GPUS = {
    "H200": Device(
        name="H200",
        memory_bytes=141_000_000_000,
        bandwidth=4.8e12,
        flops=989e12,
        link_bandwidth=450e9,
        link_latency_s=NVLINK_ALL_REDUCE_S,
    ),
    "H100": Device(
        name="H100",
        memory_bytes=80_000_000_000,
        bandwidth=3.35e12,
        flops=989e12,
        link_bandwidth=450e9,
        link_latency_s=NVLINK_ALL_REDUCE_S,
    ),
    "A100": Device(
        name="A100",
        memory_bytes=80_000_000_000,
        bandwidth=2.039e12,
        flops=312e12,
        link_bandwidth=300e9,
        link_latency_s=NVLINK_ALL_REDUCE_S,
    ),
    "L40S": Device(
        name="L40S",
        memory_bytes=48_000_000_000,
        bandwidth=0.864e12,
        flops=362e12,
        link_bandwidth=32e9,
        link_latency_s=PCIE_ALL_REDUCE_S,
    ),
    "B200": Device(
        name="B200",
        memory_bytes=180_000_000_000,
        bandwidth=8.0e12,
        flops=2250e12,
        link_bandwidth=900e9,
        link_latency_s=NVLINK_ALL_REDUCE_S,
    ),
}
