"""Who can reach a rank: the ports it opens, what it asks for there, what it is told."""

from collections.abc import Iterator

import grpc
import psutil
import pytest

from protos import worker_pb2, worker_pb2_grpc
from protos.tls import open_channel
from runtime.cluster.group import WorkerGroup
from runtime.errors import ConfigError
from tests.cluster_certs import Nodes, save_nodes, unchecked_client
from tests.rank_groups import ranks, ready_executor, small_plan, started
from tests.steps import execute
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

CALL_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    return save_nodes(tmp_path_factory.mktemp("nodes"))


@pytest.fixture(scope="module")
def on_this_node(model: str, nodes: Nodes) -> Iterator[WorkerGroup]:
    """For a driver that knows secrets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_API_KEY", "sk-secret")
        patch.setenv("LOCKSTEP_ENGINE_TOKEN", "secret")
        with started(model, "local", cluster_certs=str(nodes.good)) as group:
            yield group


def test_two_ranks_step_over_mutual_tls(on_this_node: WorkerGroup, nodes: Nodes) -> None:
    check_mutual_tls(on_this_node, nodes)


@pytest.mark.full
def test_also_over_ray(model: str, nodes: Nodes) -> None:
    with started(model, "ray", cluster_certs=str(nodes.good)) as group:
        check_mutual_tls(group, nodes)


def check_mutual_tls(group: WorkerGroup, nodes: Nodes) -> None:
    executor = ready_executor(group)
    results = [execute(executor, small_plan(step_id)) for step_id in (1, 2)]
    heard = [
        refusal(client.address.target, credentials)
        for client in group._clients
        for credentials in (None, unchecked_client(nodes.stranger))
    ]

    assert results[0].token_ids == results[1].token_ids
    assert heard == [grpc.StatusCode.UNAVAILABLE] * 4


def refusal(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    """Where there is a port, but no connection to it, calls end with UNAVAILABLE."""
    request = worker_pb2.ShutdownRequest(epoch=1)
    with open_channel(target, (), credentials) as channel, pytest.raises(grpc.RpcError) as refused:
        worker_pb2_grpc.WorkerStub(channel).Shutdown(request, timeout=CALL_S)
    return refused.value.code()


@pytest.mark.usefixtures("no_process_left")
def test_certificates_that_cannot_be_used_start_nothing(model: str, nodes: Nodes) -> None:
    with (
        pytest.raises(ConfigError, match=r"cluster_certs: .*node\.pem .* has expired"),
        started(model, "local", cluster_certs=str(nodes.expired)),
    ):
        pass


@pytest.mark.usefixtures("on_this_node")
def test_a_worker_gets_no_secret_but_its_token() -> None:
    environments = [rank.environ() for rank in ranks()]

    assert len(environments) == 2
    assert not [name for each in environments for name in each if each[name].endswith("secret")]


@pytest.mark.usefixtures("on_this_node")
def test_a_rank_listens_on_its_own_address_alone() -> None:
    addresses = [
        connection.laddr.ip.removeprefix("::ffff:")
        for rank in ranks()
        for connection in rank.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]

    # gRPC of each rank, and the store of the first; tensors go through memory.
    assert addresses == ["127.0.0.1"] * 3
