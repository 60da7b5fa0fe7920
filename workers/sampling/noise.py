"""Gumbel noise by a counter-based hash: a function of (seed, position, domain, id) alone."""

import torch


def _signed(bits: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return bits - (1 << 64) if bits >> 63 else bits


# Constants of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
GAMMA = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


def row_keys(seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[R] int64 keys of the rows' noise, from seeds and positions [R] int64."""
    return _mix(_mix(seed + GAMMA) ^ _mix(positions * GAMMA + MIX_1))


def gumbel(keys: torch.Tensor, domain: int, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [R, n] float64 of ids [n] or [R, n]: a function of (key, domain, id) alone."""
    streams = _mix(keys + _signed((domain * 0xD1B54A32D192ED03) % (1 << 64)))
    bits = _mix(streams.to(ids.device)[:, None] + (ids + 1) * GAMMA)
    # 52 bits and a half: inside (0, 1), both ends excluded, exactly representable.
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64, on int64 that wrap around."""
    bits = (bits ^ _shift(bits, 30)) * MIX_1
    bits = (bits ^ _shift(bits, 27)) * MIX_2
    return bits ^ _shift(bits, 31)


def _shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift: int64's own shift drags the sign along."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
