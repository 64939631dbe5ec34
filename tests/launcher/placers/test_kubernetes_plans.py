"""Manifests: our own rules, on every shape of run, and the published schemas where they are installed."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import SpecError
from manyhands.launcher.placers.kubernetes import FINAL_CODES, how_to_follow, manifest, object_name, plan
from manyhands.launcher.placers.spec import PlacedRun
from manyhands.spec.cluster_section import ClusterSection

ROOT = Path(__file__).parents[3]
VALIDATOR = ROOT / ".bench-venvs/kubernetes/bin/python"
KEY = "5ec7e7" * 10 + "abcd"
RUN = PlacedRun(
    name="20261119-080000-train",
    settings=("--insecure-data-plane", "--seed=3"),
    script=("train.py", "--lr", "0.1"),
    folder="/home/ada",
    run_dir="runs/a",
    jobs_dir="/home/ada/.manyhands/jobs",
    program=("mh",),
    environment={"MANYHANDS_SEED": "3"},
)
SHAPES: list[dict[str, Any]] = [
    {"hosts": 1},
    {"hosts": 4, "gpus": 2, "cpus": 8, "memory": "64G", "time": "8:00:00", "queue": "team", "namespace": "ml"},
    {"hosts": (2, 8)},
    {"hosts": 4, "manifest": "job"},
]


def made(**settings: Any) -> dict[str, Any]:
    return manifest(ClusterSection(on="kubernetes", image="registry/train:1", **settings), RUN, KEY)


def job_specs(found: dict[str, Any]) -> dict[str, Any]:
    body = found["items"][-1]
    if body["kind"] == "Job":
        return {"job": body["spec"]}
    return {one["name"]: one["template"]["spec"] for one in body["spec"]["replicatedJobs"]}


def container_of(spec: dict[str, Any]) -> dict[str, Any]:
    (container,) = spec["template"]["spec"]["containers"]
    return dict(container)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    else:
        yield str(value)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_key_is_in_the_secret_and_nowhere_else(shape):
    found = made(**shape)
    secret, *others = found["items"]
    encoded = secret["data"]["run.key"]
    assert base64.b64decode(encoded).decode() == KEY
    assert all(KEY not in text and encoded not in text for other in others for text in texts(other))
    for spec in job_specs(found).values():
        pod = spec["template"]["spec"]
        (volume,) = [one["secret"] for one in pod["volumes"] if "secret" in one]
        assert (volume["secretName"], volume["defaultMode"]) == (secret["metadata"]["name"], 0o400)


def test_a_fixed_number_of_pods_are_the_nodes_of_torchruns_flags():
    container = container_of(job_specs(made(hosts=4, gpus=2))["node"])
    master = "mh-20261119-080000-train-node-0-0.mh-20261119-080000-train"
    assert container["command"] == ["mh"]
    assert container["args"] == [
        *("run", "--on=here", "--insecure-data-plane", "--seed=3", "--nnodes=4", "--nproc-per-node=2"),
        *(f"--master-addr={master}", "--master-port=29400", "train.py", "--lr", "0.1"),
    ]
    rank = next(one for one in container["env"] if one["name"] == "PET_NODE_RANK")
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_pods_above_the_least_number_are_agents_that_join_the_first():
    jobs = job_specs(made(hosts=(2, 8)))
    assert (jobs["node"]["completions"], jobs["more"]["parallelism"]) == (1, 7)
    first, more = container_of(jobs["node"]), container_of(jobs["more"])
    assert {"--workers=1", "--elastic=2:8", "--hosts-wanted=2", "--listen=$(POD_IP):29400"} <= set(first["args"])
    assert more["args"][:2] == [
        "agent",
        "--join=mh-20261119-080000-train-node-0-0.mh-20261119-080000-train:29400",
    ]


def test_what_a_jobset_does_follows_from_our_exit_codes():
    """The message of a Job's failure names the rule that matched: that is all a JobSet knows of an exit code."""
    found = made(hosts=4)
    job, policy = job_specs(found)["node"], found["items"][-1]["spec"]["failurePolicy"]
    outcome = {}
    for number, rule in enumerate(job["podFailurePolicy"]["rules"]):
        message = f"Container manyhands for pod ml/x failed with exit code 7 matching FailJob rule at index {number}"
        (action,) = [
            one["action"] for one in policy["rules"] if re.search(one["onJobFailureMessagePatterns"][0], message)
        ]
        outcome |= dict.fromkeys(rule["onExitCodes"]["values"], action)
    assert outcome == {75: "RestartJobSetAndIgnoreMaxRestarts"} | dict.fromkeys(FINAL_CODES, "FailJobSet")
    assert job["backoffLimit"] == 0  # any other code, such as that of SIGKILL: the JobSet restarts, a few times
    assert policy["maxRestarts"] == 3


def test_a_plain_job_starts_a_stopped_pod_again_and_finds_its_pods_by_a_service():
    found = made(hosts=4, manifest="job")
    service, job = found["items"][1:]
    spec = job["spec"]
    actions = [rule["action"] for rule in spec["podFailurePolicy"]["rules"]]
    assert actions == ["FailJob", "Ignore", "Ignore"]
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [75]
    assert spec["podFailurePolicy"]["rules"][2]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    master = f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}"
    assert master in container_of(spec)["args"]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pod_has_time_to_commit_and_is_never_restarted_in_place(shape):
    for spec in job_specs(made(**shape)).values():
        pod = spec["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= 30 + 5
        assert pod["restartPolicy"] == "Never"  # podFailurePolicy is only allowed with it
        assert spec["completionMode"] == "Indexed"


def test_time_queue_and_namespace_are_where_kubernetes_looks_for_them():
    found = made(**SHAPES[1])
    body = found["items"][-1]
    assert job_specs(found)["node"]["activeDeadlineSeconds"] == 8 * 3600
    assert body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert {item["metadata"]["namespace"] for item in found["items"]} == {"ml"}
    assert container_of(job_specs(found)["node"])["resources"]["requests"]["memory"] == "64Gi"


@pytest.mark.parametrize("text", ["20261119-080000-train", "Train_Model.v2", "x" * 90, "-a-", "数据"])
def test_names_are_those_that_kubernetes_accepts_with_what_it_appends(text):
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", object_name(text))
    assert len(f"{object_name(text)}-node-0-100-abcde") <= 63


def test_what_cannot_be_a_manifest_is_refused():
    with pytest.raises(SpecError, match="Pods need an image"):
        manifest(ClusterSection(on="kubernetes", hosts=2), RUN, KEY)
    with pytest.raises(SpecError, match="which is what a JobSet is"):
        made(hosts=(2, 4), manifest="job")


def test_kubectl_reads_the_manifest_from_standard_input():
    found = plan(ClusterSection(on="kubernetes", image="i", namespace="ml"), RUN, KEY)
    assert found.commands[0].argv == ("kubectl", "--namespace=ml", "apply", "-f", "-")
    assert KEY not in found.text()
    assert "kubectl -n ml logs -f -l" in how_to_follow(ClusterSection(namespace="ml"), "a")


@pytest.mark.long
def test_what_kubectl_refuses_is_said_with_what_to_type(tmp_path):
    """The real kubectl, and no API server: there is none that could be installed for a test."""
    if shutil.which("kubectl") is None:
        pytest.skip("NOT SHOWN HERE: kubectl is missing; Debian package kubernetes-client")
    (tmp_path / "train.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "manyhands.cli.main", "run", "--on", "kubernetes", "--image", "i", "train.py"],
        cwd=tmp_path, env={**os.environ, "KUBECONFIG": "/dev/null"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 3 and "kubectl did not apply the manifest: " in done.stderr
    assert "try: kubectl cluster-info" in done.stderr


@pytest.mark.long
def test_manifests_satisfy_the_published_schemas():
    """Those of Secret, Service and Job; the Jobs of a JobSet are checked as Jobs, as its controller makes them."""
    if not VALIDATOR.exists():
        pytest.skip("NOT SHOWN HERE: manifests against schemas need `make .bench-venvs/kubernetes/installed`")
    items = []
    for shape in SHAPES:
        found = made(**shape)
        items += [item for item in found["items"] if item["kind"] != "JobSet"]
        for name, spec in job_specs(found).items():
            items.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec})
    assert validate(items) == []
    misspelt = json.loads(json.dumps(items[-1]))
    misspelt["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    assert len(validate([misspelt])) == 2  # in both versions: the check is one that can fail


def validate(items: list[dict[str, Any]]) -> list[str]:
    code = (
        "import json, sys, kubernetes_validate as checker\n"
        "for version in ('1.31', '1.37'):\n"
        "    for item in json.loads(sys.argv[1]):\n"
        "        try:\n"
        "            checker.validate(item, version, strict=True)\n"
        "        except checker.ValidationError as error:\n"
        "            print(version, item['kind'], error.message)\n"
    )
    done = subprocess.run(
        [VALIDATOR, "-c", code, json.dumps(items)], capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.splitlines()
