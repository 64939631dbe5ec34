"""Kubernetes: the manifest of a run, as plain values that are JSON and so YAML.

A fixed number of pods is one indexed Job, in a JobSet where its controller is installed. Pods above the least number
are a second Job of the JobSet, whose agents join. The key is in a Secret, mounted with mode 0400. What ends the run for
good and what starts it again is decided by our exit codes. Pure. Start reading at `manifest`.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from manyhands.errors import SpecError
from manyhands.launcher.placers.spec import LaunchPlan, PlacedRun, PlanCommand
from manyhands.spec.cluster_section import ClusterSection, seconds_of

__all__ = ["FINAL_CODES", "PORT", "manifest", "object_name", "plan", "rules_of"]

PORT = 29400
"""A pod has its own address, so that the port need not differ from run to run."""
KEY_DIR = "/var/run/manyhands"
KEY_FILE = "run.key"
FINAL_CODES = (1, 2, 3, 4, 70, 130)
"""The script failed, wrong usage, the machine, given up, a bug of ours, Ctrl-C: the same again would end the same."""
STOPPED = 75
MAX_RESTARTS = 3
GRACE_S = 65
"""Between the notice to a pod and its end; the agent uses 5 s less."""
LABEL = "app.kubernetes.io/managed-by"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

Manifest = dict[str, Any]


def plan(cluster: ClusterSection, run: PlacedRun, key: str) -> LaunchPlan:
    found = manifest(cluster, run, key)
    kubectl = ("kubectl", *([f"--namespace={cluster.namespace}"] if cluster.namespace else []))
    apply = PlanCommand(argv=(*kubectl, "apply", "-f", "-"), secret=True, first=True)
    return LaunchPlan(placer="kubernetes", commands=(apply,), manifest=found, notes=tuple(_notes(cluster)))


def _notes(cluster: ClusterSection) -> list[str]:
    defaults = ClusterSection()
    names = ("more_queue", "account", "array", "setup", "extra", "notice", "code")
    return [
        f"{name} has no meaning for Kubernetes." for name in names if getattr(cluster, name) != getattr(defaults, name)
    ]


def manifest(cluster: ClusterSection, run: PlacedRun, key: str) -> Manifest:
    """A List of the Secret with the key, and of what runs the pods."""
    if cluster.image is None:
        raise SpecError(
            "Pods need an image, which has the script and manyhands.",
            where="--image",
            fix=["--image registry/name:tag"],
        )
    name = object_name(run.name)
    least, most = cluster.count
    if most > least and cluster.manifest == "job":
        what = f"{least}:{most} hosts are two Jobs that belong together, which is what a JobSet is."
        raise SpecError(what, where="--hosts", fix=["--manifest jobset", f"--hosts {least}"])
    pods = _Pods(cluster, run, name)
    body = [pods.job_set()] if cluster.manifest == "jobset" else [pods.service(), pods.job()]
    return {"apiVersion": "v1", "kind": "List", "items": [pods.secret(key), *body]}


def object_name(text: str) -> str:
    """A name that Kubernetes accepts; JobSet appends up to 20 characters to it, within 63."""
    name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"mh-{name}".strip("-")


class _Pods:
    def __init__(self, cluster: ClusterSection, run: PlacedRun, name: str) -> None:
        self.cluster, self.run, self.name = cluster, run, name
        self.least, self.most = cluster.count
        self.elastic = self.most > self.least
        self.workers = run.workers or cluster.gpus or 1

    def secret(self, key: str) -> Manifest:
        data = {KEY_FILE: base64.b64encode(key.encode()).decode()}
        metadata = self._metadata(f"{self.name}-key")
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}

    def service(self) -> Manifest:
        """The names of a plain Job's pods; a JobSet makes its own."""
        spec = {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": self.name},
            # Pods look each other up before they are ready.
            "publishNotReadyAddresses": True,
        }
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._metadata(self.name), "spec": spec}

    def job(self) -> Manifest:
        """Without a JobSet, Job itself starts pods again: those that were stopped, and those that their node lost."""
        spec = self._job_spec(self.least, self._rank_words(f"{self.name}-0.{self.name}"), subdomain=self.name)
        spec["backoffLimit"] = MAX_RESTARTS * self.least
        spec["podFailurePolicy"] = {
            "rules": [_on_codes("FailJob", FINAL_CODES), _on_codes("Ignore", (STOPPED,)), ON_DISRUPTION]
        }
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(self.name, queue=True),
            "spec": spec,
        }

    def job_set(self) -> Manifest:
        jobs = [self._replicated("node", 1 if self.elastic else self.least, self._first_words())]
        if self.elastic:
            jobs.append(self._replicated("more", self.most - 1, self._agent_words()))
        spec = {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["node"]},
            "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": rules_of()},
            "replicatedJobs": jobs,
        }
        metadata = self._metadata(self.name, queue=True)
        return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}

    def _replicated(self, name: str, pods: int, words: list[str]) -> Manifest:
        spec = self._job_spec(pods, words)
        spec["backoffLimit"] = 0 if name == "node" else MAX_RESTARTS * pods
        # The JobSet decides by the number of the rule: 0, stopped; 1, for good.
        rules = [_on_codes("FailJob", (STOPPED,)), _on_codes("FailJob", FINAL_CODES)]
        spec["podFailurePolicy"] = {"rules": rules if name == "node" else [ON_DISRUPTION]}
        return {"name": name, "replicas": 1, "template": {"spec": spec}}

    def _job_spec(self, pods: int, words: list[str], subdomain: str | None = None) -> Manifest:
        spec: Manifest = {
            "completionMode": "Indexed",
            "parallelism": pods,
            "completions": pods,
            "template": {"metadata": {"labels": {LABEL: "manyhands"}}, "spec": self._pod_spec(words, subdomain)},
        }
        if self.cluster.time is not None:
            spec["activeDeadlineSeconds"] = seconds_of(self.cluster.time)
        return spec

    def _pod_spec(self, words: list[str], subdomain: str | None) -> Manifest:
        mounts = [{"name": "key", "mountPath": KEY_DIR, "readOnly": True}, {"name": "memory", "mountPath": "/dev/shm"}]
        container: Manifest = {
            "name": "manyhands",
            "image": self.cluster.image,
            "command": list(self.run.program),
            "args": words,
            "env": self._environment(),
            "volumeMounts": mounts,
            "resources": self._resources(),
        }
        key = {"secretName": f"{self.name}-key", "defaultMode": 0o400}
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_S,
            **({"subdomain": subdomain} if subdomain else {}),
            "containers": [container],
            "volumes": [{"name": "key", "secret": key}, {"name": "memory", "emptyDir": {"medium": "Memory"}}],
        }

    def _environment(self) -> list[Manifest]:
        variables = {"MANYHANDS_KEY_FILE": f"{KEY_DIR}/{KEY_FILE}", "MANYHANDS_RUN_DIR": self.run.run_dir}
        plain = [{"name": name, "value": text} for name, text in (variables | self.run.environment).items()]
        name, path = ("POD_IP", "status.podIP") if self.elastic else ("PET_NODE_RANK", INDEX)
        return [*plain, {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}]

    def _resources(self) -> Manifest:
        memory = f"{self.cluster.memory}i" if self.cluster.memory else None
        found = {"cpu": self.cluster.cpus, "memory": memory, "nvidia.com/gpu": self.cluster.gpus or None}
        limits = {name: str(value) for name, value in found.items() if value is not None}
        return {"requests": limits, "limits": limits} if limits else {}

    def _rank_words(self, master: str) -> list[str]:
        """torchrun's flags: the rank is the pod's index, in PET_NODE_RANK."""
        return [
            *("run", "--on=here", *self.run.settings, f"--nnodes={self.least}", f"--nproc-per-node={self.workers}"),
            *(f"--master-addr={master}", f"--master-port={PORT}", *self.run.script),
        ]

    def _first_words(self) -> list[str]:
        master = f"{self.name}-node-0-0.{self.name}"
        if not self.elastic:
            return self._rank_words(master)
        return [
            *("run", "--on=here", *self.run.settings, f"--workers={self.workers}"),
            f"--elastic={self.least * self.workers}:{self.most * self.workers}",
            *(f"--hosts-wanted={self.least}", f"--listen=$(POD_IP):{PORT}", *self.run.script),
        ]

    def _agent_words(self) -> list[str]:
        return ["agent", f"--join={self.name}-node-0-0.{self.name}:{PORT}", f"--workers={self.workers}", "--ui=none"]

    def _metadata(self, name: str, *, queue: bool = False) -> Manifest:
        labels = {LABEL: "manyhands"}
        if queue and self.cluster.queue:
            labels["kueue.x-k8s.io/queue-name"] = self.cluster.queue
        namespace = {"namespace": self.cluster.namespace} if self.cluster.namespace else {}
        return {"name": name, **namespace, "labels": labels}


ON_DISRUPTION: Manifest = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
"""A pod that its node lost, or that gave way to another one, counts as no failure."""


def _on_codes(action: str, codes: tuple[int, ...]) -> Manifest:
    return {"action": action, "onExitCodes": {"containerName": "manyhands", "operator": "In", "values": list(codes)}}


def rules_of() -> list[Manifest]:
    """JobSet knows a Job's failure by its reason and message, and the message has the number of the Job's rule."""
    reasons = ["PodFailurePolicy"]
    return [
        {
            "name": "Stopped",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": reasons,
            "onJobFailureMessagePatterns": [r"matching FailJob rule at index 0$"],
        },
        {
            "name": "Final",
            "action": "FailJobSet",
            "onJobFailureReasons": reasons,
            "onJobFailureMessagePatterns": [r"matching FailJob rule at index 1$"],
        },
    ]


def how_to_follow(cluster: ClusterSection, name: str) -> str:
    """What to type next."""
    kubectl = f"kubectl -n {cluster.namespace}" if cluster.namespace else "kubectl"
    job, kind = (f"{name}-node-0", "jobset") if cluster.manifest == "jobset" else (name, "job")
    label = f"batch.kubernetes.io/job-name={job},batch.kubernetes.io/job-completion-index=0"
    service = f" service/{name}" if kind == "job" else ""
    return f"follow: {kubectl} logs -f -l {label}\nstop:   {kubectl} delete {kind}/{name} secret/{name}-key{service}"
