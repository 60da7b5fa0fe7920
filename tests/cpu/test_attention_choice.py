"""Which attention backend is chosen, and the reasons why others are not."""

import logging
import sys
import types
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch

from runtime.cluster.loaded_model import loaded_model
from runtime.config import EngineConfig
from runtime.driver import plan_cache
from runtime.errors import ConfigError
from tests.flash_libraries import (
    flash_attn_varlen_func_2,
    flash_attn_varlen_func_4,
    flash_attn_with_kvcache_3,
    needs_block_tables,
)
from tests.transport import model_spec
from workers.attention import flash_attn, torch_varlen
from workers.attention.base import AttentionShape, UnsuitedError
from workers.attention.choice import BACKENDS, choose
from workers.codec import encode_spec
from workers.errors import ModelError

pytestmark = pytest.mark.cpu

CUDA = torch.device("cuda", 0)
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, k_dim=64, v_dim=64, scale=0.125)
ENTRIES = {
    "flash_attn": {"flash_attn_varlen_func": flash_attn_varlen_func_2},
    "flash_attn_interface": {"flash_attn_with_kvcache": flash_attn_with_kvcache_3},
    "flash_attn.cute": {"flash_attn_varlen_func": flash_attn_varlen_func_4},
}
BY_KERNEL = {"FA2": "flash_attn", "FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}


@pytest.fixture
def machine(monkeypatch):
    """Makes this a CUDA machine of a capability, on which these libraries are installed."""

    def make(capability=(9, 0), installed=("FA4", "FA3", "FA2")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        for kernel, module in BY_KERNEL.items():
            fake = types.ModuleType(module)
            vars(fake).update(ENTRIES[module])
            monkeypatch.setitem(sys.modules, module, fake if kernel in installed else None)

    return make


def make_flash(shape=SHAPE, dtype=torch.bfloat16, device=CUDA, *, deterministic=False):
    return flash_attn.make([SHAPE, shape], dtype, device, deterministic=deterministic)


def make_varlen(shape=SHAPE, dtype=torch.bfloat16, device=CUDA, *, deterministic=False):
    return torch_varlen.make([SHAPE, shape], dtype, device, deterministic=deterministic)


@pytest.mark.parametrize(
    ("capability", "installed", "taken", "block_size_multiple"),
    [
        ((8, 0), ("FA4", "FA3", "FA2"), "FA2", 256),
        ((9, 0), ("FA4", "FA3", "FA2"), "FA4 on Hopper", 1),
        ((9, 0), ("FA3", "FA2"), "FA3", 1),
        ((9, 0), ("FA2",), "FA2", 256),
        ((10, 3), ("FA4", "FA3", "FA2"), "FA4 on Blackwell", 1),
        ((10, 0), ("FA3", "FA2"), "FA2", 256),
        ((12, 0), ("FA4", "FA3", "FA2"), "FA2", 256),
    ],
)
def test_the_newest_that_is_there_and_suits(
    machine, caplog, capability, installed, taken, block_size_multiple
):
    machine(capability, installed)

    with caplog.at_level(logging.INFO):
        backend = make_flash()

    assert backend.block_size_multiple == block_size_multiple
    assert f"flash_attn by {taken} (" in caplog.text


def test_sinks_and_different_dims_take_a_kernel_that_has_them(machine, caplog):
    with caplog.at_level(logging.INFO):
        machine((9, 0))
        make_flash(replace(SHAPE, has_sinks=True))
        machine((9, 0), ("FA3", "FA2"))
        make_flash(replace(SHAPE, k_dim=192, v_dim=128))

    assert "flash_attn by FA4 on Hopper" in caplog.messages[0]
    assert "flash_attn by FA3" in caplog.messages[1]


@pytest.mark.parametrize(
    ("capability", "changes", "reasons"),
    [
        ((7, 5), {}, ["FA2 takes compute capability 8.x, 9.x, 10.x, 12.x, not 7.5"]),
        ((9, 0), {"chunk": 8}, [f"{each} doesn't mask chunk=8" for each in ("FA3", "FA2")]),
        ((9, 0), {"k_dim": 264, "v_dim": 264}, ["FA4 on Hopper takes", "FA3 takes", "FA2 takes"]),
        ((9, 0), {"k_dim": 65, "v_dim": 65}, ["not 65 of keys and 65 of values"]),
        ((8, 0), {"k_dim": 192, "v_dim": 128}, ["FA2 takes equal head dims of at most 256"]),
        ((10, 0), {"k_dim": 192, "v_dim": 64}, ["FA4 on Blackwell takes head dims of at most 128"]),
        ((8, 0), {"has_sinks": True}, ["FA2 has no sinks"]),
    ],
)
def test_calls_that_no_library_takes(machine, capability, changes, reasons):
    machine(capability)

    with pytest.raises(UnsuitedError) as refused:
        make_flash(replace(SHAPE, **changes))

    assert all(reason in str(refused.value) for reason in reasons)


def test_libraries_that_are_not_there_are_told_from_broken_ones(machine, monkeypatch):
    machine((9, 0), ())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("other"))

    with pytest.raises(UnsuitedError, match="FA4 on Hopper isn't installed") as refused:
        make_flash()

    assert "FA3 can't be imported" in str(refused.value)
    assert "FA2 isn't installed" in str(refused.value)


def test_a_release_without_what_is_needed_is_refused(machine, monkeypatch):
    def old(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_size):
        raise AssertionError("not to be called")

    machine((8, 0))
    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", old)

    with pytest.raises(UnsuitedError, match="FA2 that is installed has no block_table, softcap"):
        make_flash()


@pytest.mark.parametrize("make", [make_flash, make_varlen])
def test_devices_and_number_formats_that_no_kernel_is_for(machine, monkeypatch, make):
    machine((9, 0))

    with pytest.raises(UnsuitedError, match="needs a CUDA device, not cpu"):
        make(device=torch.device("cpu"))
    with pytest.raises(UnsuitedError, match="takes bfloat16 and float16, not float32"):
        make(dtype=torch.float32)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UnsuitedError, match="ROCm"):
        make()


@pytest.mark.parametrize(
    ("capability", "installed", "window", "reason"),
    [
        ((8, 0), ("FA2",), 0, "FA2 isn't deterministic: it splits keys"),
        ((10, 0), ("FA4",), 0, "FA4 on Blackwell isn't deterministic: its stages"),
        ((9, 0), ("FA4",), 7, "FA4 on Hopper isn't deterministic with window=7"),
        ((9, 0), ("FA3",), 7, "FA3 isn't deterministic with window=7"),
        ((9, 0), ("FA4",), 0, None),
        ((9, 0), ("FA3",), 0, None),
    ],
)
def test_deterministic_only_where_batches_do_not_matter(
    machine, capability, installed, window, reason
):
    machine(capability, installed)
    shape = replace(SHAPE, window=window)

    assert isinstance(make_flash(shape) if reason else make_flash(), flash_attn.FlashAttention)
    if reason is None:
        make_flash(shape, deterministic=True)
        return
    with pytest.raises(UnsuitedError, match=reason):
        make_flash(shape, deterministic=True)


@needs_block_tables
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"softcap": 30.0}, "varlen_attn has no softcap=30.0"),
        ({"has_sinks": True}, "varlen_attn has no sinks"),
        ({"chunk": 8}, "varlen_attn doesn't mask chunk=8"),
        ({"v_dim": 32}, "varlen_attn takes equal head dims"),
        ({"k_dim": 320, "v_dim": 320}, "not 320 of keys"),
    ],
)
def test_calls_that_torchs_own_kernel_does_not_take(machine, changes, reason):
    machine()

    assert make_varlen(replace(SHAPE, window=7)).block_size_multiple == 256
    with pytest.raises(UnsuitedError, match=reason):
        make_varlen(replace(SHAPE, **changes))


@needs_block_tables
def test_torch_is_new_enough_and_its_kernel_its_own(machine, monkeypatch):
    machine((7, 5))
    with pytest.raises(UnsuitedError, match=r"compute capability .*, not 7\.5"):
        make_varlen()
    machine((8, 6))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(UnsuitedError, match=r"torch 2\.11\.0\+cu130's .* needs 2\.12"):
        make_varlen()
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    assert make_varlen()
    with pytest.raises(UnsuitedError, match=r"torch 2\.12\.1's .* needs 2\.13"):
        make_varlen(deterministic=True)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    assert make_varlen(replace(SHAPE, window=7), deterministic=True)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    with pytest.raises(UnsuitedError, match="FA3 was put in place of torch's own"):
        make_varlen()


@needs_block_tables
def test_torchs_line_for_each_call_is_not_logged(machine, monkeypatch):
    log = logging.getLogger("torch.nn.attention.varlen")
    monkeypatch.setattr(log, "level", logging.INFO)
    machine()

    make_varlen()

    assert not log.isEnabledFor(logging.INFO)


def choose_auto(shape=SHAPE, *, device=CUDA):
    return choose("auto", [SHAPE, shape], dtype=torch.bfloat16, device=device)


@needs_block_tables
def test_auto_takes_the_first_that_suits_and_says_why(machine, caplog):
    with caplog.at_level(logging.INFO, logger="workers.attention.choice"):
        machine((8, 0), ("FA2",))
        assert choose_auto().name == "flash_attn"
        machine((8, 0), ())
        assert choose_auto().name == "torch_varlen"
        assert choose_auto(replace(SHAPE, softcap=50.0)).name == "reference"
        assert choose_auto(device=torch.device("cpu")).name == "native"

    chosen = [each for each in caplog.messages if each.startswith("attention backend")]
    assert chosen[0] == "attention backend flash_attn (the first choice)"
    assert chosen[1].startswith("attention backend torch_varlen (flash_attn: FA4 on Blackwell")
    assert "torch_varlen: varlen_attn has no softcap=50.0" in chosen[2]
    cpu = "needs a CUDA device, not cpu"
    reasons = f"flash_attn: {cpu}; torch_varlen: {cpu}; triton: not on cpu"
    assert chosen[3] == f"attention backend native ({reasons})"


def test_a_backend_that_is_named_is_taken_or_refused(machine):
    machine((8, 0), ("FA2",))
    options = {"dtype": torch.float16, "device": CUDA}

    assert choose("flash_attn", [SHAPE], **options).name == "flash_attn"
    with pytest.raises(ModelError, match=r"attention=flash_attn can't serve this: .*FA2 has no s"):
        choose("flash_attn", [replace(SHAPE, has_sinks=True)], **options)
    with pytest.raises(ModelError, match="must be auto, flash_attn, torch_varlen"):
        choose("flash", [SHAPE], **options)


def test_the_command_line_names_all_backends():
    (names,) = (get_args(get_type_hints(EngineConfig)["attention"]),)

    assert names == ("auto", *BACKENDS)


def test_a_block_size_that_the_backend_does_not_take():
    worker = model_spec(attention="torch_varlen", block_size_multiple=256)
    spec = loaded_model([encode_spec(worker)])

    assert plan_cache(EngineConfig(block_size=256), spec).block_size == 256
    with pytest.raises(ConfigError, match=r"block_size=16 must be a multiple of 256: .*torch_v"):
        plan_cache(EngineConfig(block_size=16), spec)
