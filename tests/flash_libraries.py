"""The entry points of flash attention's releases: their signatures, computed in plain torch.

Each computes from its arguments alone, so that a wrong length, window or scale shows. Signatures:
flash-attn 2.8.3, FA3 3.0.0b1 (the `hopper` folder of the same release), flash-attn-4 4.0.0b36.
"""

from itertools import pairwise

import pytest
import torch
from torch.torch_version import TorchVersion

from workers.attention.torch_varlen import FIRST_VERSION

needs_block_tables = pytest.mark.skipif(
    TorchVersion(torch.__version__) < FIRST_VERSION,
    reason="this torch's varlen_attn has no block tables",
)


def flash_attn_varlen_func_2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert k.shape[3] == v.shape[3]
    output = torch.empty_like(q)  # as there: in the query's layout
    lens = _lens(cu_seqlens_k)
    assert max_seqlen_k >= max(lens)
    _attend(
        output,
        (q, k, v),
        starts=cu_seqlens_q,
        max_query_len=max_seqlen_q,
        lens=lens,
        table=block_table,
        reach=(window_size[0], 0 if causal else window_size[1]),
        scale=softmax_scale,
        softcap=softcap,
    )
    return output


def flash_attn_with_kvcache_3(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    output = q.new_empty(*q.shape[:2], v_cache.shape[3])
    _attend(
        output,
        (q, k_cache, v_cache),
        starts=cu_seqlens_q,
        max_query_len=max_seqlen_q,
        lens=_int32(cache_seqlens),
        table=page_table,
        reach=(window_size[0], 0 if causal else window_size[1]),
        scale=softmax_scale,
        softcap=softcap,
    )
    return output


def flash_attn_varlen_func_4(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    assert cu_seqlens_k is None, "refused there beside page_table"
    output = q.new_empty(*q.shape[:2], v.shape[3])
    lens = _int32(seqused_k)
    assert max_seqlen_k >= max(lens)
    left, right = (-1 if side is None else side for side in window_size)
    _attend(
        output,
        (q, k, v),
        starts=cu_seqlens_q,
        max_query_len=max_seqlen_q,
        lens=lens,
        table=page_table,
        reach=(left, 0 if causal else right),
        scale=softmax_scale,
        softcap=softcap,
        sinks=learnable_sink,
    )
    return output, None


def torch_flash_attention_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """Of aten::_flash_attention_forward, below torch 2.13's varlen_attn."""
    assert key.shape[3] == value.shape[3]
    assert cum_seq_k.shape == cum_seq_q.shape
    output = torch.empty_like(query)
    lens = _int32(seqused_k)
    assert max_k >= max(lens)
    _attend(
        output,
        (query, key, value),
        starts=cum_seq_q,
        max_query_len=max_q,
        lens=lens,
        table=block_table,
        reach=(window_size_left, 0 if is_causal else window_size_right),
        scale=scale,
    )
    nothing = query.new_empty(0)
    return output, nothing, nothing, nothing, nothing


def _attend(
    output, tensors, *, starts, max_query_len, lens, table, reach, scale, softcap=0.0, sinks=None
):
    """Fills output [T, Hq, V]; mask aligned bottom right; a side of -1 has no end."""
    query, keys, values = tensors
    assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == table.stride(-1) == 1
    assert table.dtype == torch.int32
    edges = _int32(starts)
    assert len(edges) - 1 == len(lens) == len(table)
    block_size = keys.shape[1]
    group = query.shape[1] // keys.shape[2]
    sink = torch.full((query.shape[1],), float("-inf")) if sinks is None else sinks
    for row, ((start, end), total) in enumerate(zip(pairwise(edges), lens, strict=True)):
        assert end - start <= max_query_len
        blocks = [table[row, at // block_size].item() for at in range(total)]
        offsets = [at % block_size for at in range(total)]
        own_keys = keys[blocks, offsets].repeat_interleave(group, dim=1)
        own_values = values[blocks, offsets].repeat_interleave(group, dim=1)
        for at in range(start, end):
            place = total - (end - at)
            first = 0 if reach[0] < 0 else max(0, place - reach[0])
            last = total if reach[1] < 0 else min(total, place + reach[1] + 1)
            scores = torch.einsum("khd,hd->hk", own_keys[first:last], query[at]) * scale
            if softcap:
                scores = (scores / softcap).tanh() * softcap
            weights = torch.cat((scores, sink[:, None]), dim=1).softmax(1)[:, :-1]
            output[at] = torch.einsum("hk,khd->hd", weights, own_values[first:last])


def _lens(starts):
    edges = _int32(starts)
    assert edges[0] == 0
    return [end - start for start, end in pairwise(edges)]


def _int32(numbers):
    assert numbers.dtype == torch.int32
    assert numbers.is_contiguous()
    return numbers.tolist()
