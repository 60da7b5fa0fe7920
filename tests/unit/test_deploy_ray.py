"""`ray up` and KubeRay take their files, whose containers run what there is."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.scripts.scripts
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from protos import inference_pb2_grpc
from runtime.config import EngineConfig
from runtime.errors import ConfigError
from runtime.frontend_config import FrontendConfig
from tests.deploy_files import (
    DEPLOY,
    LONGEST_END_S,
    PROJECT,
    REPOSITORY,
    find_commands,
    load_yaml,
    read_command,
)

pytestmark = pytest.mark.unit

RAY_CLUSTER = DEPLOY / "ray-cluster.yaml"
MANIFESTS = sorted((DEPLOY / "kuberay").glob("*.yaml"))
SCHEMAS = Path(os.environ.get("LOCKSTEP_SCHEMAS", REPOSITORY.parent / "shared" / "schemas"))
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
ADDRESS = "10.0.0.7"


def by_kind(path: Path) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in load_yaml(path)}


def cluster_of(path: Path) -> dict[str, Any]:
    kinds = by_kind(path)
    if "RayCluster" in kinds:
        return kinds["RayCluster"]["spec"]
    return kinds["RayService"]["spec"]["rayClusterConfig"]


def groups_of(path: Path) -> list[dict[str, Any]]:
    cluster = cluster_of(path)
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods_of(path: Path) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in groups_of(path)]


def driver() -> dict[str, Any]:
    (head, _) = pods_of(DEPLOY / "kuberay" / "raycluster.yaml")
    found: dict[str, Any] = head["containers"][1]
    return found


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, refusing fields that it doesn't name, which Kubernetes drops without a word."""
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema = {"additionalProperties": False} | schema
    return {
        key: {name: strict(each) for name, each in value.items()}
        if key == "properties"
        else strict(value)
        if key in ("items", "additionalProperties") and isinstance(value, dict)
        else value
        for key, value in schema.items()
    }


def schema_errors(resource: dict[str, Any]) -> Iterator[str]:
    path = SCHEMAS / f"kuberay-ray.io_{resource['kind'].lower()}s.yaml"
    # In C: there is a megabyte of it.
    definition = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    (schema,) = (
        version["schema"]["openAPIV3Schema"]
        for version in definition["spec"]["versions"]
        if resource["apiVersion"] == f"ray.io/{version['name']}"
    )
    for error in jsonschema.Draft202012Validator(strict(schema)).iter_errors(resource):
        yield f"{error.json_path}: {error.message}"


def test_ray_up_takes_its_file() -> None:
    (config,) = load_yaml(RAY_CLUSTER)
    validate_config(prepare_config(config))
    with pytest.raises(jsonschema.ValidationError, match="'dockr' was unexpected"):
        validate_config(prepare_config(config | {"dockr": {}}))


def test_ray_up_starts_ray_as_ray_can_be_started() -> None:
    (config,) = load_yaml(RAY_CLUSTER)
    for part, is_head in (("head_start_ray_commands", True), ("worker_start_ray_commands", False)):
        stop, start = (shlex.split(command) for command in config[part])
        assert stop == ["ray", "stop"]
        assert start[:2] == ["ray", "start"]
        with ray.scripts.scripts.start.make_context("start", start[2:]) as context:
            assert context.params["head"] == is_head


def test_what_is_run_on_the_head_joins_its_ray() -> None:
    (config,) = load_yaml(RAY_CLUSTER)
    (command,) = find_commands(RAY_CLUSTER.read_text())
    engine = read_command(command)[EngineConfig]
    assert engine.ray_address == f"{config['provider']['head_ip']}:6379"


@pytest.mark.skipif(not SCHEMAS.is_dir(), reason=f"KubeRay's schemas aren't in {SCHEMAS}")
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kuberay_takes_its_files(path: Path) -> None:
    (resource,) = (each for each in load_yaml(path) if each["apiVersion"].startswith("ray.io/"))
    assert list(schema_errors(resource)) == []
    resource["spec"]["workerGroupSpec"] = []
    assert len(list(schema_errors(resource))) == 1


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_run_as_the_images_user_with_the_images_ray(path: Path) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    (ray_needed,) = (each for each in PROJECT["dependencies"] if each.startswith("ray>="))
    assert cluster_of(path)["rayVersion"].startswith(ray_needed.removeprefix("ray>="))
    for pod in pods_of(path):
        security = pod["securityContext"]
        assert security["runAsNonRoot"]
        assert f"\nUSER {security['runAsUser']}:{security['runAsGroup']}\n" in dockerfile


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_ray_is_started_as_it_can_be_started(path: Path) -> None:
    for group in groups_of(path):
        options = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        ray.scripts.scripts.start.make_context("start", options)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_secrets_come_of_a_secret(path: Path) -> None:
    (secret,) = re.findall(r"create secret generic (\w+)", MANIFESTS[0].read_text())
    assert cluster_of(path)["authOptions"] == {"mode": "token", "secretName": secret}
    for pod in pods_of(path):
        for variable in (each for one in pod["containers"] for each in one.get("env", ())):
            if SECRET.search(variable["name"]):
                assert variable["valueFrom"]["secretKeyRef"]["name"] == secret


def test_the_driver_joins_the_ray_of_its_pod() -> None:
    program, *command = driver()["command"]
    assert program == "lockstep"
    arguments = [each.replace("$(POD_IP)", ADDRESS) for each in driver()["args"]]
    configs = read_command([*command, *arguments])
    assert configs[EngineConfig].ray_address == f"{ADDRESS}:6379"
    assert configs[FrontendConfig].host == "0.0.0.0"
    head, workers = groups_of(DEPLOY / "kuberay" / "raycluster.yaml")
    assert head["rayStartParams"]["num-cpus"] == "0"
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert configs[EngineConfig].tp == workers["replicas"] * int(limits["nvidia.com/gpu"])


def test_the_drivers_ports_are_those_it_binds() -> None:
    ports = {each["name"]: each["containerPort"] for each in driver()["ports"]}
    assert ports == {"grpc": FrontendConfig().port, "http": FrontendConfig().http_port}
    service = by_kind(DEPLOY / "kuberay" / "raycluster.yaml")["Service"]
    assert {each["targetPort"]: each["port"] for each in service["spec"]["ports"]} == ports


def test_the_driver_may_take_its_time_to_start_and_to_end() -> None:
    startup = driver()["startupProbe"]
    budget_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert budget_s > EngineConfig().startup_timeout_s
    (head, _) = pods_of(DEPLOY / "kuberay" / "raycluster.yaml")
    assert head["terminationGracePeriodSeconds"] > LONGEST_END_S
    (_, replica) = pods_of(DEPLOY / "kuberay" / "rayservice.yaml")
    assert replica["terminationGracePeriodSeconds"] > LONGEST_END_S


def test_the_driver_and_ray_see_each_other() -> None:
    (head, _) = pods_of(DEPLOY / "kuberay" / "raycluster.yaml")
    assert head["shareProcessNamespace"]
    mounts = [{each["name"] for each in one["volumeMounts"]} for one in head["containers"]]
    assert all({"ray", "shm"} <= each for each in mounts)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Serve's own, when imported
def test_ray_serve_takes_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.schema import ServeDeploySchema

    resource = by_kind(DEPLOY / "kuberay" / "rayservice.yaml")["RayService"]
    given = yaml.safe_load(resource["spec"]["serveConfigV2"])
    serve = ServeDeploySchema.model_validate(given)
    (application,) = serve.applications
    # It drops what it doesn't know.
    for part, known in ((given, serve), (given["applications"][0], application)):
        assert part.keys() <= type(known).model_fields.keys()
    monkeypatch.syspath_prepend(DEPLOY)
    monkeypatch.setenv("LOCKSTEP_API_KEY", "a-key")
    import serve_app

    assert application.import_path == "serve_app:build"
    built = serve_app.build(application.args)._bound_deployment
    engines = built.init_args[0]._bound_deployment
    scaling = engines._deployment_config.autoscaling_config
    (_, replica) = pods_of(DEPLOY / "kuberay" / "rayservice.yaml")
    container = replica["containers"][0]
    (_, *ranks) = engines._replica_config.placement_group_bundles
    assert len(ranks) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {each["GPU"] for each in ranks} == {1.0}
    (_, group) = groups_of(DEPLOY / "kuberay" / "rayservice.yaml")
    assert (scaling.min_replicas, scaling.max_replicas) == (
        group["minReplicas"],
        group["maxReplicas"],
    )
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"serve": serve.http_options.port, "grpc": serve.grpc_options.port}
    (adder,) = serve.grpc_options.grpc_servicer_functions
    module, _, name = adder.rpartition(".")
    assert module == inference_pb2_grpc.__name__
    assert hasattr(inference_pb2_grpc, name)
    # Kubernetes kills no sooner than Ray Serve.
    longest_s = engines._deployment_config.graceful_shutdown_timeout_s
    assert LONGEST_END_S <= longest_s < replica["terminationGracePeriodSeconds"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("args", "key", "message"),
    [
        ({"launcher": "local"}, "a-key", "args: unknown key 'launcher'"),
        ({"tp": "4"}, "a-key", "args: tp='4' must be integer"),
        ({"max_replicas": 0}, "a-key", "max_replicas=0 must be in"),
        ({}, "", "api_key and api_keys are unset: set LOCKSTEP_API_KEY"),
    ],
)
def test_the_application_refuses_arguments(
    args: dict[str, Any], key: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DEPLOY)
    monkeypatch.setenv("LOCKSTEP_API_KEY", key)
    import serve_app

    with pytest.raises(ConfigError, match=message):
        serve_app.build(args)
