"""What docs/clusters.md offers: launchers, files and the example of Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

ROOT = Path(__file__).parent.parent
FILES = ROOT / "examples/clusters"
BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PAGE = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_")

# Three steps under dear; each rank prints itself, and what its parameters add up to.
TRAIN = """
import os, torch, torch.distributed as dist, gradtide
dist.init_process_group("gloo")
torch.manual_seed(0)
model = gradtide.DistributedDataParallel(torch.nn.Linear(8, 4), scheme="dear")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(7 * dist.get_rank()))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum(p.double().sum().item() for p in model.state_dict().values())
print("trained", dist.get_rank(), dist.get_world_size(), total, flush=True)
dist.destroy_process_group()
"""


def environment(**more: str) -> dict[str, str]:
    """This process's, without what launchers set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more}


def at_once(*started: tuple[Sequence[str], dict[str, str]]) -> list[str]:
    """What commands that need each other print; all must end with 0."""
    running = [
        subprocess.Popen(
            words, env=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for words, there in started
    ]
    try:
        told = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, (_, error) in zip(running, told, strict=True):
        assert process.returncode == 0, error
    return [out for out, _ in told]


def trained(outputs: Sequence[str]) -> None:
    """Two ranks that ended with the same parameters."""
    lines = [line.split() for out in outputs for line in out.splitlines()]
    found = sorted(line[1:] for line in lines if line[:1] == ["trained"])
    assert [line[:2] for line in found] == [["0", "2"], ["1", "2"]], outputs
    assert found[0][2] == found[1][2]


def agents(*command: str) -> list[tuple[list[str], dict[str, str]]]:
    """Two torchruns, as on two hosts, on loopback."""
    port = str(free_port())
    words = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
    words += ["--master-addr", "127.0.0.1", "--master-port", port]
    return [
        ([*words, "--node-rank", str(node), *command], environment()) for node in (0, 1)
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_torchruns_train_one_model(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    trained(at_once(*agents(str(script))))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_torchruns_are_examined(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    command = ["-m", "gradtide", "doctor", "--seconds", "0", "--json", str(out)]
    at_once(*agents(*command))
    found = json.loads(out.read_text())
    assert found["launcher"] == "torchrun"
    assert not found["failed"], found["findings"]
    assert [host["ranks"] for host in found["hosts"]] == [[0], [1]]
    assert {(link["from"], link["to"]) for link in found["links"]} == {(0, 1), (1, 0)}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_line_for_srun_trains(tmp_path: Path) -> None:
    """That of the page, run as srun would run it twice."""
    line = PAGE.split("srun bash -c '")[1].split("'")[0].replace("\\\n", "")
    (tmp_path / "train.py").write_text(TRAIN)
    _stub(tmp_path, "scontrol", "echo 127.0.0.1")
    line = line.replace("29500", str(free_port()))
    line = line.replace("examples/train_gpt.py --scheme dear", f"{tmp_path}/train.py")
    path = os.pathsep.join([str(tmp_path), str(BIN), os.environ["PATH"]])
    tasks = [
        (
            ["bash", "-c", line],
            environment(
                PATH=path,
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank),
                SLURM_NTASKS="2",
                SLURM_JOB_NODELIST="localhost",
            ),
        )
        for rank in (0, 1)
    ]
    trained(at_once(*tasks))


def _stub(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_batch_script_starts_what_it_says(tmp_path: Path) -> None:
    for name, script in (
        ("scontrol", "echo gpu07; echo gpu08"),
        ("srun", 'exec "$@"'),
        ("torchrun", 'echo torchrun "$@"'),
    ):
        _stub(tmp_path, name, script)
    there = environment(
        PATH=os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        SLURM_JOB_NODELIST="gpu[07-08]",
        SLURM_JOB_ID="12345",
        SLURM_NNODES="2",
        SLURM_CPUS_PER_TASK="16",
    )
    (out,) = at_once((["bash", str(FILES / "slurm.sbatch")], there))
    common = "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-id 12345-{} --rdzv-backend "
    common += "c10d --rdzv-endpoint gpu07:{} {}"
    assert out.splitlines() == [
        common.format("doctor", 20345, "--no-python gradtide doctor"),
        common.format(
            "train", 20346, "--max-restarts 3 examples/train_gpt.py --scheme dear"
        ),
    ]


def test_the_objects_for_kubernetes_fit_together() -> None:
    yaml = pytest.importorskip("yaml")
    objects: list[Any] = list(
        yaml.safe_load_all((FILES / "kubernetes.yaml").read_text(encoding="utf-8"))
    )
    service, job, policy = objects
    assert [each["kind"] for each in objects] == ["Service", "Job", "NetworkPolicy"]
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] == "Never"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    selected = {"job-name": name}
    assert service["spec"]["selector"] == selected
    assert policy["spec"]["podSelector"]["matchLabels"] == selected
    script = pod["containers"][0]["args"][0]
    assert f"--nnodes {spec['completions']} " in script
    assert f"{name}-0.{pod['subdomain']}" in script
    subprocess.run(["sh", "-n", "-c", script], check=True)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.timeout(240)
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
def test_ray_trains_with_two_workers(tmp_path: Path) -> None:
    example = ROOT / "examples/ray_train.py"
    assert len(example.read_text().splitlines()) <= 40
    # Ray leaves results, and a token, in the home directory.
    there = environment(
        HOME=str(tmp_path),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_raylet_start_wait_time_s="120",  # on a busy machine
    )
    (out,) = at_once(([sys.executable, str(example)], there))
    assert 0 < eval(out.splitlines()[-1])["loss"] < 8
