"""Compiles the triton backend's kernels for a GPU that needn't be there.

A process of its own, since kernels that were imported to be interpreted can't be compiled:
`python -m tests.triton_compile sm_90 bfloat16 128 128 4`, or other dtypes and dims of K and V and
heads of a group.
"""

import sys
import warnings
from collections.abc import Mapping

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.attention import cache_writes, triton_kernels
from workers.attention.triton import TILINGS, _pad

# Threads of a warp, and what every such GPU gives a program.
WARP = 32
MAX_SHARED_BYTES = 99 << 10
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


def compile_kernel(
    kernel: triton.JITFunction,
    types: Mapping[str, object],
    constants: Mapping[str, object],
    *,
    arch: int,
    num_warps: int,
    num_stages: int,
) -> None:
    """`types` are those of arguments by name, `constants` values of what is fixed."""
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=values),
        target=GPUTarget("cuda", arch, WARP),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
    )
    shared = compiled.metadata.shared
    print(f"{kernel.__name__}: {len(compiled.asm['cubin'])} bytes, {shared} of shared memory")
    if shared > MAX_SHARED_BYTES:
        sys.exit(f"{kernel.__name__} takes {shared} bytes of shared memory: {constants}")


def compile_all(
    *, arch: int, dtype: torch.dtype, k_dim: int, v_dim: int, group: int, softcap: float
) -> None:
    """With a window, and a soft cap and sinks or neither."""
    pointer, strides = POINTERS[dtype], ("i32",) * 3
    types = {
        **dict.fromkeys(("output", "query", "key", "value", "sinks"), pointer),
        **dict.fromkeys(("key_cache", "value_cache"), pointer),
        **dict.fromkeys(("partial", "tops"), "*fp32"),
        **dict.fromkeys(("slot_blocks", "slot_offsets"), "*i64"),
        **dict.fromkeys(("num_sequences", "num_splits"), "i32"),
        **dict.fromkeys(("query_strides", "key_strides", "value_strides"), strides),
        **dict.fromkeys(("key_cache_strides", "value_cache_strides"), ("i64", *strides)),
        "query_starts": "*i32",
        "scale": "fp32",
        "cache": triton_kernels.Cache(pointer, pointer, ("i64", *strides), ("i64", *strides)),
        "step": triton_kernels.Step("*i32", "*i32", "*i32", "*i32", "i32"),
    }
    tiling = TILINGS[max(min(TILINGS), _pad(max(k_dim, v_dim)) * dtype.itemsize)]
    pads = _pad(k_dim), _pad(v_dim)
    traits = triton_kernels.Traits(
        group, k_dim, v_dim, *pads, 100, 0, softcap, 16, max(_pad(group), tiling.rows), tiling.keys
    )
    sinks = {} if softcap else {"sinks": None}
    how = {"arch": arch, "num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    compile_kernel(triton_kernels.attend_tiles, types, {"TRAITS": traits, **sinks}, **how)
    how["num_warps"] = 4
    decoding = traits._replace(tile_rows=_pad(group))
    compile_kernel(triton_kernels.attend_tiles, types, {"TRAITS": decoding, **sinks}, **how)
    compile_kernel(triton_kernels.attend_splits, types, {"TRAITS": decoding}, **how)
    combined = {"V_DIM": v_dim, "V_PAD": pads[1], "SPLITS_PAD": 32, **sinks}
    compile_kernel(triton_kernels.combine_splits, types, combined, **how)
    written = cache_writes.Traits(2, 2, k_dim, v_dim, *pads)
    compile_kernel(cache_writes.write_rows, types, {"TRAITS": written}, **how)


if __name__ == "__main__":
    warnings.simplefilter("error")
    arch, dtype, *sizes = sys.argv[1:]
    for softcap in (0.0, 50.0):
        compile_all(
            arch=int(arch.removeprefix("sm_")),
            dtype=getattr(torch, dtype),
            **dict(zip(("k_dim", "v_dim", "group"), map(int, sizes), strict=True)),
            softcap=softcap,
        )
