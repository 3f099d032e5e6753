"""examples/clusters: the command of each file, with the variables that its platform sets, is a launch
on the machines that the file asks for."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import python
from training.core.project import ROOT
from training.host.placement import NODE
from training.plan.request import Request, read

yaml = pytest.importorskip("yaml")
FOLDER = ROOT / "examples/clusters"
GPUS = "nvidia.com/gpu"


def loaded(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def launched(words: list[str], environ: dict[str, str]) -> Request:
    """The request of `duet launch …` or `./launch_train.sh …`."""
    assert words[:2] == ["duet", "launch"] or words[0] == "./launch_train.sh"
    request = read("launch_train.sh", words[2 if words[0] == "duet" else 1 :], environ)
    assert request.place.kind == NODE
    return request


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes and "/dev/shm" in mounts.values()
    return dict(container)


def unknown(given: Any, read: Any, place: str = "") -> list[str]:
    """The fields that a model of Kubernetes' API has ignored, or whose values it has changed."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [
            field
            for name, value in given.items()
            for field in unknown(value, read.get(name), f"{place}.{name}")
        ]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [
            field
            for n, (one, other) in enumerate(zip(given, read, strict=True))
            for field in unknown(one, other, f"{place}[{n}]")
        ]
    return [] if given == read else [place]


def test_every_field_is_one_of_kubernetes() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = loaded("jobset.yaml")
    replicas = loaded("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"].values()
    found = [unknown(job, models.JobsetV1alpha2JobSet.from_dict(job).to_dict())]
    template = models.IoK8sApiCoreV1PodTemplateSpec
    for replica in replicas:
        pod = replica["template"]
        found.append(unknown(pod, template.from_dict(pod).to_dict()))
    assert found == [[], [], []]
    pod["spec"]["restartPolice"] = "Never"
    assert unknown(pod, template.from_dict(pod).to_dict()) == [".spec.restartPolice"]


def test_jobset(monkeypatch: pytest.MonkeyPatch) -> None:
    job = loaded("jobset.yaml")
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    container = container_of(spec["template"])
    pods = f"{job['metadata']['name']}-{replicated['name']}-0-"
    domain = f".{job['metadata']['name']}.default.svc.cluster.local"
    for index in range(spec["parallelism"]):
        monkeypatch.setattr("socket.gethostname", lambda name=f"{pods}{index}": name)
        monkeypatch.setattr("socket.getfqdn", lambda name=f"{pods}{index}{domain}": name)
        request = launched(container["command"], {"JOB_COMPLETION_INDEX": str(index)})
        assert (request.place.nnodes, request.place.node_rank) == (spec["completions"], index)
        assert request.place.master_addr == f"{pods}0{domain}"
        assert str(request.local_ranks) == container["resources"]["limits"][GPUS]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]


def test_pytorchjob() -> None:
    spec = loaded("pytorchjob.yaml")["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    nodes = sum(replica["replicas"] for replica in replicas.values())
    assert list(replicas) == ["Master", "Worker"]
    for rank, replica in enumerate(replicas.values()):
        container = container_of(replica["template"])
        assert container["name"] == "pytorch"
        environ = {  # as the operator sets them
            "MASTER_ADDR": "gpt-master-0",
            "MASTER_PORT": "23456",
            "WORLD_SIZE": str(nodes * int(spec["nprocPerNode"])),
            "RANK": str(rank),
            "PET_NNODES": str(nodes),
            "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        }
        request = launched(container["command"], environ)
        assert (request.place.nnodes, request.place.node_rank) == (nodes, rank)
        assert str(request.local_ranks) == spec["nprocPerNode"]
        assert container["resources"]["limits"][GPUS] == spec["nprocPerNode"]


def test_skypilot() -> None:
    task = loaded("skypilot.yaml")
    addresses = [f"10.0.0.{n}" for n in range(1, task["num_nodes"] + 1)]
    environ = {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_NODE_RANK": "1"}
    request = launched(shlex.split(task["run"]), environ)
    assert (request.place.nnodes, request.place.node_rank) == (task["num_nodes"], 1)
    assert request.place.master_addr == addresses[0]
    assert task["resources"]["accelerators"].endswith(f":{request.local_ranks}")
    setup = shlex.split(task["setup"], comments=True)
    assert setup == [*shlex.split(task["run"]), "--check"]
    # no output before the installation: nothing but the packages is missing, so .venv is created
    plan = ("lib/run_module.py", "training.cli.plan", "--before-install")
    done = python(*plan, setup[0].removeprefix("./"), *setup[1:], cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_compose() -> None:
    services = loaded("compose.yaml")["services"]
    for rank, service in enumerate(services.values()):
        request = launched(service["command"], service["environment"])
        assert (request.place.nnodes, request.place.node_rank) == (len(services), rank)
        assert request.place.master_addr == next(iter(services))
        build = service["build"]
        context = (FOLDER / build["context"]).resolve()
        assert context == ROOT and (context / build["dockerfile"]).is_file()


def test_slurm_names_only_files_that_exist() -> None:
    text = (FOLDER / "slurm.sh").read_text(encoding="utf-8")
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {"--nodes=2", "--ntasks-per-node=1"} <= set(options), "one launcher on each node"
    assert 'srun --kill-on-bad-exit=0 "$DUET" run -n' in text
    assert Path(FOLDER / "Dockerfile.dockerignore").is_file()
