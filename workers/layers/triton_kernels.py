"""Triton kernels for linear layers; `triton_matmul` launches them."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def matmul(
    x,  # [M, K]
    w,  # [N, K], of x's dtype or of 8 bits
    scale,  # [N] float32, or not read
    bias,  # [N], or not read
    y,  # [M, N]
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One program makes one tile of y = scale x w^T + bias. All tensors are contiguous.

    It goes through K alone and in order, in float32: a row's bits depend on no other row.
    """
    rows = tl.program_id(1).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, K, TILE_K):
        inner = start + tl.arange(0, TILE_K)
        left = tl.load(
            x + rows[:, None] * K + inner[None, :],
            mask=(rows < num_rows)[:, None] & (inner < K)[None, :],
            other=0.0,
        )
        right = tl.load(
            w + columns[None, :] * K + inner[:, None],
            mask=(columns < N)[None, :] & (inner < K)[:, None],
            other=0.0,
        )
        total = tl.dot(left, right.to(x.dtype.element_ty), total, input_precision="ieee")
    if HAS_SCALE:
        total *= tl.load(scale + columns, mask=columns < N, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + rows[:, None] * N + columns[None, :],
        total.to(y.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & (columns < N)[None, :],
    )
