"""`make gpu-check`: whether a GPU computes what it should, and how fast. In under four minutes."""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.gpu import shapes
from tests.gpu.clock import bandwidth, facts, matrix_rate
from tests.gpu.correctness import (
    Verdict,
    attempt,
    check_backends,
    check_graphs,
    check_tokens,
)
from tests.gpu.same_bits import check_deterministic, check_products
from tests.gpu.timings import Timing, time_shape

# Of the 8B shape, as the project wants them.
MAX_OVER_FLOOR = 1.35
MIN_RATIO = 8.0


def main() -> None:
    """The exit code is 1 where something is wrong; figures that miss a goal are only told."""
    arguments = _parse_arguments()
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING)
    start = time.monotonic()
    device = torch.device(arguments.device, 0 if arguments.device == "cuda" else None)
    found = facts(device)
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    smoke = arguments.smoke
    chosen = shapes.tiny_shapes() if smoke else shapes.real_shapes()

    result: dict[str, Any] = {"machine": found, "checks": [], "timings": []}
    for verdict in _verdicts(device, chosen[0], arguments.model, quick=smoke):
        _print_verdict(verdict)
        result["checks"].append(asdict(verdict))
        _write(arguments.json, result)

    bytes_per_s = bandwidth(device, 1 << (26 if smoke else 32))
    flops_per_s = matrix_rate(
        device, torch.float32 if smoke else torch.bfloat16, 512 if smoke else 8192
    )
    found |= {"bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s}
    print(f"\nmeasured: {bytes_per_s / 1e9:.0f} GB/s read, {flops_per_s / 1e12:.2f} TFLOP/s")
    _print_headers()
    for shape in chosen:
        measured = time_shape(shape, device, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s)
        try:
            for timing in measured:
                _print_timing(timing)
                result["timings"].append(timing.facts())
                _write(arguments.json, result)
        except Exception as error:
            fault = Verdict(f"timings of {shape.name}", f"{type(error).__name__}: {error}")
            _print_verdict(fault)
            result["checks"].append(asdict(fault))

    print(
        f"goals of the 8B shape: at 64 and 256 rows at most {MAX_OVER_FLOOR} times the floor; at "
        f"64 rows at least {MIN_RATIO:g} times as fast as transformers' generate"
    )
    result["seconds"] = time.monotonic() - start
    print(f"\n{result['seconds']:.0f} s in all")
    _write(arguments.json, result)
    sys.exit(any(check["fault"] for check in result["checks"]))


def _verdicts(
    device: torch.device, shape: shapes.Shape, model: Path | None, *, quick: bool
) -> Iterator[Verdict]:
    yield from check_backends(device, quick=quick)
    yield attempt("CUDA graphs", lambda: check_graphs(device, shape))
    try:
        yield from check_products(device)
    except Exception as error:
        yield Verdict("products", f"{type(error).__name__}: {error}")
    yield attempt("deterministic", lambda: check_deterministic(device, shape))
    yield attempt("tokens", lambda: check_tokens(device, model))


def _write(path: Path | None, result: dict[str, Any]) -> None:
    """After each part: a machine that is lent may be taken away."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--smoke", action="store_true", help="Tiny models: tries this program, measures nothing."
    )
    parser.add_argument("--model", type=Path, help="Folder of a model whose tokens are compared.")
    parser.add_argument("--json", type=Path, help="Write facts, verdicts and timings there.")
    parser.add_argument("--verbose", action="store_true", help="Tell what backends are chosen.")
    return parser.parse_args()


def _print_verdict(verdict: Verdict) -> None:
    state = {None: "not run", "": "right"}.get(verdict.fault, f"WRONG: {verdict.fault}")
    note = f": {verdict.note}" if verdict.note else ""
    print(f"{verdict.what:60} {state}{note}", flush=True)


def _print_headers() -> None:
    print(f"{'':44} {'ms':>8} {'floor ms':>9} {'ratio':>6} {'tokens/s':>9} {'host us':>8}")


def _print_timing(timing: Timing) -> None:
    floor = "" if timing.floor_ms is None else f"{timing.floor_ms:.3f}"
    over = "" if timing.over_floor is None else f"{timing.over_floor:.2f}"
    host = "" if timing.host_us is None else f"{timing.host_us:.0f}"
    print(
        f"{timing.what:44} {timing.milliseconds:8.3f} {floor:>9} {over:>6} "
        f"{timing.tokens_per_s:9.0f} {host:>8}",
        flush=True,
    )
    if timing.ratio is not None:
        print(f"{'':44} our decode step: {timing.ratio:.1f} times as many tokens a second")


if __name__ == "__main__":
    main()
