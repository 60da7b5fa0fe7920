"""The process group: ranks of one process meet at a store and exchange tensors."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.tiny_models import load_executor, save_tiny_model
from workers.collectives.process_group import ProcessGroup
from workers.config import WorkerConfig
from workers.errors import CollectiveError, WorkerError
from workers.parallel import CPU, Shard, TensorParallel, Topology, join, open_rendezvous

pytestmark = pytest.mark.cpu


def make_config(rank: int, tp: int, port: int) -> WorkerConfig:
    return WorkerConfig(
        model_path="",
        rank=rank,
        tp_size=tp,
        rendezvous_host="127.0.0.1",
        rendezvous_port=port,
    )


@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_add_and_gather(tp):
    store, port = open_rendezvous(tp, "127.0.0.1")

    def run(rank: int):
        parallel = join(make_config(rank, tp, port), store if rank == 0 else None)
        total = parallel.all_reduce(torch.full((2, 3), float(rank + 1)))
        gathered = parallel.gather_to_sampler(torch.full((2, 2), float(rank)).t())
        parallel.close()
        parallel.close()
        return total, gathered

    with ThreadPoolExecutor(tp) as threads:
        results = list(threads.map(run, range(tp)))

    for total, _ in results:
        assert total.equal(torch.full((2, 3), tp * (tp + 1) / 2))
    assert results[0][1].equal(torch.arange(tp).repeat_interleave(2).expand(2, -1).float())
    assert [gathered for _, gathered in results[1:]] == [None] * (tp - 1)


def test_two_epochs_of_one_process_do_not_mix():
    stores = [open_rendezvous(2, "127.0.0.1") for _ in range(2)]

    def run(place: tuple[int, int]):
        epoch, rank = place
        store, port = stores[epoch]
        parallel = join(make_config(rank, 2, port), store if rank == 0 else None)
        total = parallel.all_reduce(torch.tensor([10.0**epoch]))
        parallel.close()
        return total.item()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, [(0, 0), (0, 1), (1, 0), (1, 1)])) == [2, 2, 20, 20]


def test_the_rendezvous_listens_at_its_host_alone():
    _store, port = open_rendezvous(2, "127.0.0.1")

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


def test_one_rank_needs_no_rendezvous():
    parallel = join(make_config(0, 1, 0), None)
    tensor = torch.ones(3)

    assert parallel.all_reduce(tensor) is tensor
    assert parallel.gather_to_sampler(tensor) is tensor
    assert parallel.is_sampler


def test_a_rank_beyond_the_group_is_refused():
    store, port = open_rendezvous(2, "127.0.0.1")
    config = make_config(2, 2, port)

    with pytest.raises(WorkerError, match=r"rank=2 must be in \[0, 2\)"):
        join(config, store)


@pytest.mark.parametrize("name", ["pp", "ep", "dp"])
def test_other_kinds_of_parallelism_are_refused(name):
    with pytest.raises(WorkerError, match=f"{name}=2 must be 1"):
        Topology(tp=2, **{name: 2})


def test_shards_cover_a_dimension_once():
    ranks = [TensorParallel(Topology(tp=4), rank, None) for rank in range(4)]

    even = [rank.even_shard(1, 12) for rank in ranks]
    padded = [rank.padded_shard(0, 5) for rank in ranks]

    assert even == [Shard(dim=1, ranges=((3 * r, 3 * r + 3),), size=3) for r in range(4)]
    assert [(*s.ranges[0], s.size) for s in padded] == [
        (0, 2, 2),
        (2, 4, 2),
        (4, 5, 2),
        (5, 5, 2),
    ]


class LostPeer:
    """A group whose other rank has gone."""

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_lost_peer_is_no_fault_of_the_model(tmp_path):
    """A dry run that fails in a collective says nothing of the model's parts."""
    folder = save_tiny_model(tmp_path / "llama")
    group = ProcessGroup(LostPeer(), rank=0, size=2, sampler_rank=0, device=CPU, is_ordered=False)
    ranks = TensorParallel(Topology(tp=2), 0, group)

    with pytest.raises(CollectiveError, match="a collective failed: Connection closed by peer"):
        load_executor(folder, ranks)
