"""Replicas behind Ray Serve: `import_path: serve_app:build`, as in kuberay/rayservice.yaml.

Each replica is an engine, whose ranks are in the placement group that Ray Serve makes for it.
Frontends are the deployment that Ray Serve gives HTTP and gRPC requests to; tokens come to them by
the engines' own streams, and requests go on elsewhere when a replica is lost. Arguments are options
of `lockstep serve` with _ for -, and those in runtime/replicas/config.py. The API key and the
replicas' token come by LOCKSTEP_API_KEY and LOCKSTEP_ENGINE_TOKEN.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import ray.util
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from protos import inference_pb2
from runtime.commands.common import pick, read_options
from runtime.config import EngineConfig, require_key
from runtime.errors import ConfigError
from runtime.frontend.keys import read_tenants
from runtime.frontend.relayed_calls import CallFailedError
from runtime.frontend_config import FrontendConfig
from runtime.replicas.config import ReplicasConfig
from runtime.replicas.engine import STOP_S, EngineReplica
from runtime.replicas.frontend import ReplicaFrontend, replica_frontend

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "LOCKSTEP_ENGINE_TOKEN"
# Ray Serve has the ports, and the groups in which ranks are placed.
NOT_OURS = (
    *("launcher", "ray_address", "workers"),
    *("host", "port", "http_port", "tls_cert", "tls_key", "tls_client_ca"),
    *("log_format", "reflection", "max_header_bytes", "max_connections"),
)
# Those of many frontends are spread; prompts that begin alike share a cache.
ROUTING = "prefix"
FIND_TIMEOUT_S = 5.0
# Beside the requests that frontends count themselves: pages, probes, what they refuse.
OTHER_CALLS = 1024


class Engine:
    """A replica, as Ray Serve knows it."""

    def __init__(self, config: EngineConfig, token: str, drain_timeout_s: float) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._replica = EngineReplica(config, host=ray.util.get_node_ip_address(), token=token)

    def address(self) -> str:
        return self._replica.address

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.load()

    def check_health(self) -> None:
        """Raises what has ended the engine, which then gets a successor."""
        if (ended := self._replica.why_ended()) is not None:
            raise ended

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):  # its start may have failed
            # Not on the event loop, where those still ask who have heard nothing yet.
            await asyncio.to_thread(self._replica.close, self._drain_timeout_s)


@serve.ingress()
class Frontend:
    """A frontend, as Ray Serve knows it: HTTP, and the methods of lockstep.v1.Inference."""

    async def __init__(self, engines: DeploymentHandle, config: FrontendConfig, token: str) -> None:
        self._stack = AsyncExitStack()
        self._frontend = await self._stack.enter_async_context(
            replica_frontend(config, token, partial(find_replicas, engines))
        )

    def __serve_build_asgi_app__(self) -> ReplicaFrontend:
        return self._frontend

    async def Generate(
        self, request: inference_pb2.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        with reporting(grpc_context):
            calls = self._frontend.calls
            stream = calls.generate(request, grpc_context.invocation_metadata())
            async with aclosing(stream):
                async for each in stream:
                    yield each

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, grpc_context: RayServegRPCContext
    ) -> inference_pb2.TokenizeResponse:
        return await self._answer(self._frontend.calls.service.Tokenize, request, grpc_context)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, grpc_context: RayServegRPCContext
    ) -> inference_pb2.DetokenizeResponse:
        return await self._answer(self._frontend.calls.service.Detokenize, request, grpc_context)

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, grpc_context: RayServegRPCContext
    ) -> inference_pb2.GetModelResponse:
        return await self._answer(self._frontend.calls.service.GetModel, request, grpc_context)

    async def GetStats(
        self, request: inference_pb2.GetStatsRequest, grpc_context: RayServegRPCContext
    ) -> inference_pb2.GetStatsResponse:
        return await self._answer(self._frontend.calls.service.GetStats, request, grpc_context)

    def check_health(self) -> None:
        self._frontend.check()

    async def __del__(self) -> None:
        await self._stack.aclose()

    async def _answer(
        self,
        method: Callable[[Any, Any], Awaitable[Any]],
        request: Any,
        grpc_context: RayServegRPCContext,
    ) -> Any:
        with reporting(grpc_context):
            metadata = grpc_context.invocation_metadata()
            return await self._frontend.calls.answer(method, request, metadata)


@contextmanager
def reporting(grpc_context: RayServegRPCContext) -> Iterator[None]:
    """Gives Ray Serve the status of a call that fails."""
    try:
        yield
    except CallFailedError as error:
        grpc_context.set_code(error.code)
        grpc_context.set_details(error.details)
        # It travels to Ray Serve's proxy, which needs none of our code.
        raise RuntimeError(str(error)) from error


async def find_replicas(engines: DeploymentHandle) -> Sequence[str] | None:
    """Addresses of all, as a FindReplicas of runtime.replicas.frontend."""
    asked = engines.broadcast("address")
    try:
        found = await asked.results_async(timeout_s=FIND_TIMEOUT_S, return_exceptions=True)
    except DeploymentUnavailableError:
        return ()
    except (TimeoutError, RayError, RayServeException) as error:
        logger.info("the replicas can't be asked now: %s", error)
        return None
    # Where one doesn't answer, Ray Serve finds out why.
    return None if any(isinstance(each, BaseException) for each in found) else found


def build(args: Mapping[str, Any]) -> Application:
    """The application. Raises ConfigError: an argument can't be used, or there is no key."""
    values = read_options(
        {"routing": ROUTING} | dict(args),
        *(EngineConfig, FrontendConfig, ReplicasConfig),
        source="args",
        leave_out=NOT_OURS,
    )
    engine, frontend = pick(EngineConfig, values), pick(FrontendConfig, values)
    replicas = pick(ReplicasConfig, values)
    if not read_tenants(frontend):
        raise ConfigError("api_key and api_keys are unset: set LOCKSTEP_API_KEY")
    # One that is made is another at each deployment, which starts everything anew.
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    require_key(TOKEN_VARIABLE, token)
    engines = serve.deployment(Engine, name="Engine").options(
        **engine_options(engine, replicas, frontend.drain_timeout_s)
    )
    frontends = serve.deployment(Frontend, name="Frontend").options(
        num_replicas=replicas.frontends,
        max_ongoing_requests=frontend.max_requests + OTHER_CALLS,
        graceful_shutdown_timeout_s=frontend.drain_timeout_s + STOP_S,
    )
    bound = engines.bind(replace(engine, launcher="ray"), token, frontend.drain_timeout_s)
    return frontends.bind(bound, frontend, token)


def engine_options(
    engine: EngineConfig, replicas: ReplicasConfig, drain_timeout_s: float
) -> dict[str, Any]:
    """Of the deployment of engines."""
    rank = {"CPU": 1.0, "GPU": 1.0} if engine.device == "cuda" else {"CPU": 1.0}
    return {
        "ray_actor_options": {"num_cpus": 1},
        "placement_group_bundles": [{"CPU": 1.0}, *[rank] * engine.tp],
        "placement_group_strategy": engine.placement.upper(),
        "graceful_shutdown_timeout_s": drain_timeout_s + STOP_S,
        # Frontends ask for addresses all the time.
        "logging_config": {"enable_access_log": False},
        "autoscaling_config": AutoscalingConfig(
            min_replicas=replicas.min_replicas,
            max_replicas=replicas.max_replicas,
            upscale_delay_s=replicas.upscale_delay_s,
            downscale_delay_s=replicas.downscale_delay_s,
            look_back_period_s=replicas.look_back_s,
            policy=AutoscalingPolicy(
                policy_function="runtime.replicas.scaling:ScalingPolicy",
                policy_kwargs={
                    "target_queue": replicas.target_queue,
                    "target_kv_usage": replicas.target_kv_usage,
                },
            ),
        ),
    }
