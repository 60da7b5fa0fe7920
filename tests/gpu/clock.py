"""Times on a device, and what the device could do at best."""

import gc
import time
from collections.abc import Callable
from statistics import median

import torch

WARM = 3


def seconds(
    run: Callable[[], object], device: torch.device, *, repeats: int, warm: int = WARM
) -> float:
    """Median of whole runs, each to its end on the device, after `warm` that don't count."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - start)
    return median(times)


def release(device: torch.device) -> None:
    """Frees what nobody holds any more, cycles among them."""
    gc.collect()
    wait(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second of reading, by a sum over a tensor that no cache holds."""
    tensor = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / seconds(tensor.sum, device, repeats=10)


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a square product."""
    one = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / seconds(lambda: one @ one, device, repeats=10)


def facts(device: torch.device) -> dict[str, object]:
    import transformers

    found: dict[str, object] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "processors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return found
