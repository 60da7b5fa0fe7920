"""What is counted of a device's memory, with a device that is numbers alone."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.tiny_models import Row, load_executor, make_batch, make_layout, save_tiny_model
from workers import model_executor
from workers.actor import cuda_index
from workers.batch import Batch
from workers.collectives import process_group
from workers.config import WorkerConfig
from workers.device import choose_device, use_cuda_device
from workers.dry_run import largest_batch, measure_model, one_group
from workers.errors import ModelError
from workers.memory import GIB, MemoryUse, explaining, measure
from workers.parallel import TensorParallel, Topology

pytestmark = pytest.mark.cpu


class Numbers:
    """As DeviceMemory; what a step takes comes and goes with `hold` and `drop`."""

    def __init__(self, *, total: int, others: int, held: int) -> None:
        self._total, self._others, self._held = total, others, held
        self._kept = 0
        self._peak = held

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total - self._others - self.reserved()

    def reserved(self) -> int:
        return self._held + self._kept

    def release(self) -> None:
        self._kept = 0
        self._peak = self._held

    def peak_reserved(self) -> int:
        return self._peak

    def hold(self, count: int) -> None:
        self._held += count
        self._peak = max(self._peak, self.reserved())

    def drop(self, count: int) -> None:
        """As torch does: it keeps them for later."""
        self._held -= count
        self._kept += count


def test_each_part_is_counted_once() -> None:
    memory = Numbers(total=1000, others=50, held=300)

    def step() -> None:
        memory.hold(120)
        memory.drop(110)  # a workspace of 10 stays for good

    use = measure(memory, fraction=0.9, run_largest_step=step, capture=lambda: 40)

    assert use == MemoryUse(total=1000, fraction=0.9, parameters=300, step=120, graphs=40, other=50)
    assert use.left == 900 - 300 - 120 - 40 - 50
    use.check()


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        ({"parameters": 900}, "--tp to more"),
        ({"step": 900}, "--max-num-batched-tokens or --max-num-seqs to less"),
        ({"graphs": 900}, "--enforce-eager"),
        ({"other": 900}, "end what else is on the device"),
    ],
)
def test_too_little_memory_says_what_took_it(parts: dict[str, int], advice: str) -> None:
    sizes = {"parameters": 1, "step": 1, "graphs": 1, "other": 1} | parts
    use = MemoryUse(
        total=1000 * GIB, fraction=0.9, **{name: size * GIB for name, size in sizes.items()}
    )

    said = rf"no GPU memory is left for the KV cache: of 1000\.00 GiB, .*900\.00 GiB.*; .*{advice}"
    with pytest.raises(ModelError, match=said):
        use.check()


def test_the_largest_step_runs_on_a_cache_of_its_own(tmp_path: Path) -> None:
    executor = load_executor(save_tiny_model(tmp_path / "m"))
    layout = make_layout(executor.spec)
    config = WorkerConfig(
        model_path="", max_num_batched_tokens=70, max_num_seqs=8, gpu_memory_fraction=0.5
    )
    ran: list[Batch] = []

    def run(batch: Batch) -> None:
        ran.append(batch)
        executor._run_largest_step(batch)

    use = measure_model(
        executor._cached, Numbers(total=GIB, others=7, held=9), config, max_model_len=64, run=run
    )

    assert (use.total, use.parameters, use.other) == (GIB, 9, 7)
    assert [len(batch.input_ids) for batch in ran] == [70]
    assert sorted(ran[0].query_lens.tolist()) == [8, 8, 9, 9, 9, 9, 9, 9]
    assert ran[0].positions.max() == 8
    executor.allocate_cache(layout)
    executor.compute_logits(
        make_batch([Row(sequence_id=1, tokens=[1], seq_len=0, block_tables=[[1]])])
    )


def test_sequences_of_the_largest_step_are_within_the_models_positions() -> None:
    batch = largest_batch(
        max_num_batched_tokens=1000,
        max_num_seqs=2,
        max_num_scored_tokens=70,
        max_model_len=64,
        block_size=16,
    )

    assert batch.query_lens.sum() == 1000
    assert len(batch.score_index) == 70
    assert batch.positions.max() < 64
    assert one_group(batch, block_size=16, num_layers=3).num_blocks == 4


def test_memory_that_does_not_suffice_is_explained() -> None:
    said = (
        r"^GPU memory doesn't suffice for the weights: Tried to allocate 2 GiB; set --tp to more$"
    )
    with pytest.raises(ModelError, match=said), explaining("the weights", "set --tp to more"):
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB. GPU 0 has ...")


@pytest.mark.parametrize(
    ("device", "visible", "index"),
    [("3", None, 3), ("3", "", 3), ("5", "4,5", 1), ("GPU-ab", "GPU-cd, GPU-ab", 1)],
)
def test_rays_devices_are_counted_as_cuda_does(
    device: str, visible: str | None, index: int
) -> None:
    assert cuda_index(device, visible) == index


def test_a_device_that_is_hidden_is_told() -> None:
    with pytest.raises(ValueError, match="GPU 1, and CUDA_VISIBLE_DEVICES=4,5 hides it"):
        cuda_index("1", "4,5")


def test_a_rank_computes_on_the_device_that_its_launcher_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])

    use_cuda_device(3)

    assert choose_device(WorkerConfig(model_path="", rank=0, device="cuda")).index == 3
    with pytest.raises(ModelError, match="CUDA device 4, but torch finds 4"):
        use_cuda_device(4)


class FakeNccl:
    """Keeps what it was made with; torch without CUDA lacks the real one."""

    class Options:
        pass

    def __init__(self, store: object, rank: int, size: int, options: "FakeNccl.Options") -> None:
        self.made = (rank, size)
        self.options = options

    def _set_default_timeout(self, timeout: object) -> None:
        self.options._timeout = timeout


def test_nccl_waits_for_loading_ranks_and_then_ends_before_the_steps_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_group.dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    config = WorkerConfig(
        model_path="", rank=1, tp_size=2, device="cuda", interface="eth7", rendezvous_host="h"
    )

    group = process_group.make_group(config, store=None)

    assert group.made == (1, 2)
    assert group.options._timeout == process_group.GROUP_TIMEOUT
    assert process_group.os.environ["NCCL_SOCKET_IFNAME"] == "=eth7"
    device = torch.device("cuda", 0)
    collectives = process_group.ProcessGroup(
        group, rank=1, size=2, sampler_rank=0, device=device, is_ordered=False
    )
    ranks = TensorParallel(Topology(tp=2), 1, collectives)
    ranks.limit_collectives(270.0)
    assert group.options._timeout.total_seconds() == 270.0


def test_a_model_that_needs_the_host_has_no_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(model_executor, "why_not_capturable", lambda model: f"{model} loops")
    backend = SimpleNamespace(name="x", is_capturable=True)

    maker = model_executor.graph_maker(
        torch.device("cuda", 0), backend, "the model", enforce_eager=False
    )

    assert maker is None
    assert "no CUDA graphs: the model loops" in caplog.text


@pytest.mark.parametrize(
    ("backend", "enforce_eager", "said"),
    [
        (SimpleNamespace(name="x", is_capturable=True), True, "enforce_eager is set"),
        (SimpleNamespace(name="x", is_capturable=False), False, "backend x reads the device"),
    ],
)
def test_why_there_are_no_graphs_is_logged(
    backend: object, enforce_eager: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    device = torch.device("cuda", 0)

    maker = model_executor.graph_maker(device, backend, None, enforce_eager=enforce_eager)

    assert maker is None
    assert "no CUDA graphs: " in caplog.text
    assert said in caplog.text
