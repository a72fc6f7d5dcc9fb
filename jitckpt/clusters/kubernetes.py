"""What Kubernetes is told of a training: one pod on each host, and what happens when one fails.

A pod that fails is replaced alone, so that the others can save. What all kinds of job do by themselves is to
end the others, and with them what is to be saved.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]

PORT, METRICS_PORT = 29500, 9400  # the first is that of torch and of Kubeflow
USER = 1000  # any number does
FOREVER = (1 << 31) - 1
HOST, NODE = "host", "node"  # of the pods' names; Kubeflow asks for the second
CHECKPOINTS, SECRETS, ETCD = "/checkpoints", "/etc/jitckpt", "/etc/etcd"
WRITABLE = (f"{CHECKPOINTS}/", "/tmp/")  # and /dev/shm
# Exit statuses after which another start would end in the same way: docs/reference/run.md.
FINAL = [1, 2, 93]
RESTARTS_IN_PLACE = 1000
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
PYTORCH_JOB_RESTARTS = 10  # of its pods: it does not look at statuses
KUBEFLOW = "trainer.kubeflow.org"


@dataclass(frozen=True)
class EtcdSecrets:
    """Names of Secrets, with keys as in Kubernetes' own types and cert-manager's; None: none is needed."""

    authority: str | None = None
    certificate: str | None = None
    user: str | None = None

    def environment(self) -> list[Manifest]:
        """Return the variables of etcdctl."""
        files = {
            "ETCDCTL_CACERT": self.authority and "ca.crt",
            "ETCDCTL_CERT": self.certificate and "tls.crt",
            "ETCDCTL_KEY": self.certificate and "tls.key",
        }
        texts = {"ETCDCTL_USER": "username", "ETCDCTL_PASSWORD": "password"} if self.user else {}
        return [
            *({"name": name, "value": f"{ETCD}/{file}"} for name, file in files.items() if file),
            *(
                {"name": name, "valueFrom": {"secretKeyRef": {"name": self.user, "key": key}}}
                for name, key in texts.items()
            ),
        ]

    def files(self) -> list[Manifest]:
        """Return where the files of a volume come from."""
        wanted = ((self.authority, ["ca.crt"]), (self.certificate, ["tls.crt", "tls.key"]))
        return [
            {"secret": {"name": name, "items": [{"key": key, "path": key} for key in keys]}}
            for name, keys in wanted
            if name
        ]


@dataclass(frozen=True)
class JobToRun:
    """What is run, and what each host gives to it.

    standbys: hosts beyond those that train. run: the options of `jitckpt run`, the script and its arguments.
    memory, shared_memory: MiB, the former with the latter. grace: seconds from SIGTERM to SIGKILL. claim: the
    volume for saves. secret: a Secret with the key "secret". queue: of Kueue.
    etcd: what it asks for, where the job is coordinated.
    """

    name: str
    image: str
    nodes: int
    standbys: int
    gpus: int
    cpus: int | None
    memory: int
    shared_memory: int
    grace: int
    claim: str
    secret: str | None
    queue: str | None
    etcd: EtcdSecrets
    coordinated: bool
    run: tuple[str, ...]

    @property
    def pods(self) -> int:
        """All hosts."""
        return self.nodes + self.standbys


def in_pod(environment: Mapping[str, str]) -> bool:
    """Return whether a process with these variables is in a pod, where names appear along with pods."""
    return "KUBERNETES_SERVICE_HOST" in environment


def job_set(training: JobToRun, *, in_place: bool) -> list[Manifest]:
    """Return a JobSet. in_place: the container of a host that fails is started again in its pod."""
    job = _job(training, _meeting(training, f"{training.name}-{HOST}-0-0.{training.name}"), in_place)
    policy: Manifest = {"maxRestarts": 0}  # a Job fails only where another start would, too
    if in_place:
        policy = {
            "maxRestarts": RESTARTS_IN_PLACE,
            "restartStrategy": "InPlaceRestart",
            "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        }
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},  # its headless service
        "failurePolicy": policy,
        "replicatedJobs": [{"name": HOST, "replicas": 1, "template": {"spec": job}}],
    }
    return [_named("jobset.x-k8s.io/v1alpha2", "JobSet", training, spec)]


def job(training: JobToRun) -> list[Manifest]:
    """Return a Job and its headless service: what every cluster has."""
    spec = _job(training, _meeting(training, f"{training.name}-0.{training.name}"), in_place=False)
    spec["template"]["metadata"] = {"labels": {"jitckpt": training.name}}
    spec["template"]["spec"] = {"subdomain": training.name, **spec["template"]["spec"]}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # hosts have to meet before they are ready
        "selector": {"jitckpt": training.name},
        "ports": [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}],
    }
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": training.name}, "spec": service},
        _named("batch/v1", "Job", training, spec),
    ]


def train_job(training: JobToRun) -> list[Manifest]:
    """Return a runtime of Kubeflow Trainer, and a TrainJob that takes it; it says who each host is."""
    job = _job(training, [], in_place=False, node=NODE)
    (container,) = job["template"]["spec"]["containers"]
    trainer = {
        "numNodes": training.nodes,
        "numProcPerNode": max(training.gpus, 1),
        "image": container["image"],
        "command": container.pop("command"),
        "args": container.pop("args"),
        "resourcesPerNode": container.pop("resources"),
    }
    for given_by_kubeflow in ("completions", "parallelism"):
        job.pop(given_by_kubeflow)
    template = {"metadata": {"labels": {f"{KUBEFLOW}/trainjob-ancestor-step": "trainer"}}, "spec": job}
    runtime = {
        "mlPolicy": {"numNodes": training.nodes, "torch": {}},
        "template": {
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [{"name": NODE, "template": template}],
            }
        },
    }
    labels = {f"{KUBEFLOW}/framework": "torch"}
    version = f"{KUBEFLOW}/v1alpha1"
    return [
        {
            "apiVersion": version,
            "kind": "TrainingRuntime",
            "metadata": {"name": training.name, "labels": labels},
            "spec": runtime,
        },
        _named(
            version,
            "TrainJob",
            training,
            {
                "runtimeRef": {"apiGroup": KUBEFLOW, "kind": "TrainingRuntime", "name": training.name},
                "trainer": trainer,
            },
        ),
    ]


def pytorch_job(training: JobToRun) -> list[Manifest]:
    """Return a PyTorchJob of Kubeflow's older operator, which says who each host is."""
    pod = _pod(training, [], in_place=False, node="pytorch")
    (container,) = pod["containers"]
    container["ports"].append({"name": "pytorchjob-port", "containerPort": PORT, "protocol": "TCP"})
    pod.pop("restartPolicy")  # it is the operator's to set

    def replicas(number: int) -> Manifest:
        return {"replicas": number, "restartPolicy": "OnFailure", "template": {"spec": pod}}

    spec = {
        "nprocPerNode": str(max(training.gpus, 1)),
        "runPolicy": {"backoffLimit": PYTORCH_JOB_RESTARTS, "cleanPodPolicy": "None"},
        "pytorchReplicaSpecs": {
            "Master": replicas(1),
            **({"Worker": replicas(training.nodes - 1)} if training.nodes > 1 else {}),
        },
    }
    return [_named("kubeflow.org/v1", "PyTorchJob", training, spec)]


def _named(version: str, kind: str, training: JobToRun, spec: Manifest) -> Manifest:
    labels = {} if training.queue is None else {"labels": {"kueue.x-k8s.io/queue-name": training.queue}}
    metadata = {"name": training.name, **labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _meeting(training: JobToRun, first: str) -> list[str]:
    """Return how the hosts find each other. first: the name of the first one's pod."""
    if training.coordinated:
        return ["--nnodes", str(training.nodes), "--rdzv-id", training.name]
    if training.pods == 1:
        return ["--standalone"]
    if training.standbys:  # whoever comes first trains
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-id", training.name]
    else:  # a pod that is replaced has its predecessor's number, and place
        where = ["--master-addr", first, "--master-port", str(PORT)]
    return ["--nnodes", str(training.nodes), *where]


def _job(training: JobToRun, meeting: list[str], in_place: bool, node: str = HOST) -> Manifest:
    return {
        "completionMode": "Indexed",
        "completions": training.pods,
        "parallelism": training.pods,
        "backoffLimit": FOREVER,  # a pod that fails is replaced, and nothing else happens
        "podReplacementPolicy": "Failed",  # of two pods with one name and place the first has ended
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": node, "operator": "In", "values": FINAL},
                },
            ]
        },
        "template": {"spec": _pod(training, meeting, in_place, node)},
    }


def _pod(training: JobToRun, meeting: list[str], in_place: bool, node: str) -> Manifest:
    container = _container(training, meeting, node)
    if in_place:
        again = {"operator": "NotIn", "values": [0, *FINAL]}
        container["restartPolicy"] = "Never"
        container["restartPolicyRules"] = [{"action": "Restart", "exitCodes": again}]
    return {
        "restartPolicy": "Never",  # the Job replaces the pod
        "terminationGracePeriodSeconds": training.grace,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": _volumes(training),
    }


def _container(training: JobToRun, meeting: list[str], node: str) -> Manifest:
    """Return the one container of a pod, in which `jitckpt run` is a host of the job."""
    fixed = training.standbys == 0 and training.pods > 1 and not training.coordinated
    place = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    mounts: list[Manifest] = [
        {"name": "checkpoints", "mountPath": CHECKPOINTS},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "temporary", "mountPath": "/tmp"},
    ]
    if training.secret is not None:
        mounts.append({"name": "secret", "mountPath": SECRETS, "readOnly": True})
    if training.etcd.files():
        mounts.append({"name": "etcd", "mountPath": ETCD, "readOnly": True})
    variables = [*([place] if meeting and fixed else []), *training.etcd.environment()]
    return {
        "name": node,
        "image": training.image,
        "command": ["jitckpt", "run"],
        "args": [
            *meeting,
            *(["--nproc-per-node", str(max(training.gpus, 1))] if meeting else []),
            *("--checkpoint-dir", f"{CHECKPOINTS}/{training.name}"),  # others may have the volume, too
            *("--metrics", f"0.0.0.0:{METRICS_PORT}"),
            *([] if training.secret is None else ["--secret-file", f"{SECRETS}/secret"]),
            *map(_taken_as_it_is, training.run),
        ],
        **({"env": variables} if variables else {}),
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}],
        # No liveness probe: a host that waits, for others or for a slow disk, is not to be killed.
        "readinessProbe": {"httpGet": {"path": "/metrics", "port": "metrics"}, "periodSeconds": 10},
        "resources": _resources(training),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _taken_as_it_is(text: str) -> str:
    """Return what Kubernetes makes text of: $(NAME) is to it a variable's value, $$ is one $."""
    return text.replace("$", "$$")


def _resources(training: JobToRun) -> Manifest:
    amounts = {
        **({} if training.cpus is None else {"cpu": str(training.cpus)}),
        "memory": f"{training.memory}Mi",
        **({"nvidia.com/gpu": str(training.gpus)} if training.gpus else {}),
    }
    # Those that have them ask for the processors, and may take more.
    limits = {name: amount for name, amount in amounts.items() if name != "cpu"}
    return {"requests": amounts, "limits": limits}


def _volumes(training: JobToRun) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": training.claim}},
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{training.shared_memory}Mi"},
        },
        {"name": "temporary", "emptyDir": {}},
    ]
    if training.secret is not None:
        source = {"secretName": training.secret, "defaultMode": 0o440}  # for the pod's group
        volumes.append({"name": "secret", "secret": source})
    if files := training.etcd.files():
        volumes.append({"name": "etcd", "projected": {"sources": files, "defaultMode": 0o440}})
    return volumes
