"""Manifests for Kubernetes: they are what its own schemas take, and a lost pod ends no other.

The models of Kubeflow Trainer's package are made from the schemas of Kubernetes, JobSet and Trainer; the
CustomResourceDefinitions themselves lie in tests/unit/crds.
"""

import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import crd_schemas
import jsonschema
import pytest
import yaml

from jitckpt.cli import main
from jitckpt.cli.kubernetes import KINDS, LEEWAY
from jitckpt.clusters import kubernetes
from jitckpt.hosts import etcd
from jitckpt.wire import exit_statuses

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "kubernetes").glob("*.yaml"))
MODELS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobsetV1alpha2JobSet",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "TrainerV1alpha1TrainingRuntime",
    ("batch/v1", "Job"): "IoK8sApiBatchV1Job",
    ("v1", "Service"): "IoK8sApiCoreV1Service",
}
COMMON = ["--image", "i", "--nodes", "4", "--gpus", "8", "--memory", "256", "--claim", "c"]


def read(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """Return the manifests that the command prints."""
    assert main(["kubernetes", *COMMON, *arguments]) == 0
    return read(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["kubernetes", *COMMON, *arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err


def pods(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all that describes a pod within a manifest."""
    if isinstance(tree, dict):
        if "containers" in tree:
            yield tree
        for inner in tree.values():
            yield from pods(inner)
    elif isinstance(tree, list):
        for inner in tree:
            yield from pods(inner)


def taken_by_model(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what Kubeflow's model keeps of a manifest: all that the schema knows."""
    name = MODELS[manifest["apiVersion"], manifest["kind"]]
    model = getattr(import_module("kubeflow_trainer_api.models"), name)
    kept: dict[str, Any] = model.from_dict(manifest).to_dict()
    return kept


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_what_its_command_prints(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(path.read_text().splitlines()[0].partition(": ")[2])
    assert words[:2] == ["jitckpt", "kubernetes"]
    assert main(words[1:]) == 0
    assert capsys.readouterr().out == path.read_text(), "examples/kubernetes/make makes it anew"


def test_each_kind_has_an_example() -> None:
    kinds = {manifest["kind"].lower() for path in EXAMPLES for manifest in read(path.read_text())}
    assert set(KINDS) <= kinds


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_keeps_to_the_models_of_kubeflow(path: Path) -> None:
    for manifest in read(path.read_text()):
        if manifest["kind"] == "PyTorchJob":  # an older operator's; the pod in it is Kubernetes' own
            replicas = manifest["spec"]["pytorchReplicaSpecs"]
            job = {"template": replicas["Master"]["template"]}
            asked = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": job}
        else:
            asked = manifest
        assert taken_by_model(asked) == asked


def test_a_planted_mistake_is_seen_by_the_models() -> None:
    (manifest,) = read(next(path for path in EXAMPLES if path.name == "jobset.yaml").read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["backofLimit"] = 3
    assert taken_by_model(manifest) != manifest


@cache
def crds() -> dict[tuple[str, str], crd_schemas.Schema]:
    return crd_schemas.read()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_what_the_cluster_takes(path: Path) -> None:
    schemas = crds()
    for manifest in read(path.read_text()):
        if manifest["apiVersion"] not in ("v1", "batch/v1"):
            jsonschema.validate(manifest, schemas[manifest["apiVersion"], manifest["kind"]])


def test_a_schema_refuses_what_it_does_not_name() -> None:
    schema = crd_schemas.strict(
        {
            "type": "object",
            "properties": {
                "size": {"x-kubernetes-int-or-string": True},
                "pods": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"name": {"type": "string"}}},
                },
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                "any": {"type": "object", "properties": {}, "x-kubernetes-preserve-unknown-fields": True},
            },
        }
    )
    jsonschema.validate(
        {"size": "8Gi", "pods": [{"name": "a"}], "labels": {"b": "c"}, "any": {"d": 1}}, schema
    )
    for wrong in ({"syze": 1}, {"pods": [{"nme": "a"}]}, {"labels": {"b": 1}}, {"size": 1.5}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize("kind", ["jobset", "job", "trainjob"])
def test_a_pod_that_fails_is_replaced_alone(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    *_, manifest = printed(capsys, "--kind", kind, "--", "train.py")
    if kind == "trainjob":
        manifest = printed(capsys, "--kind", kind, "--", "train.py")[0]["spec"]["template"]
    spec = manifest["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (2**31 - 1, "Failed")
    disrupted, final = job["podFailurePolicy"]["rules"]  # the first that fits counts
    assert disrupted["action"] == "Ignore"
    assert disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert final["action"] == "FailJob"
    (container,) = job["template"]["spec"]["containers"]
    assert final["onExitCodes"]["containerName"] == container["name"]
    assert final["onExitCodes"]["values"] == [1, 2, exit_statuses.NO_PROGRESS]


def test_in_place_the_container_starts_again_but_for_final_statuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (manifest,) = printed(capsys, "--in-place-restart", "--", "train.py")
    assert manifest["spec"]["failurePolicy"]["restartStrategy"] == "InPlaceRestart"
    (pod,) = pods(manifest)
    (rule,) = pod["containers"][0]["restartPolicyRules"]
    assert rule == {"action": "Restart", "exitCodes": {"operator": "NotIn", "values": [0, 1, 2, 93]}}
    assert pod["restartPolicy"] == pod["containers"][0]["restartPolicy"] == "Never"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_pod_needs_no_root_and_writes_nowhere_else(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = list(pods(printed(capsys, "--kind", kind, "--", "train.py")))
    assert found
    for pod in found:
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm", kubernetes.CHECKPOINTS} == mounts
        assert "livenessProbe" not in container
        assert container["readinessProbe"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_grace_period_is_longer_than_the_save_deadline(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for pod in pods(printed(capsys, "--kind", kind, "--", "--save-deadline", "240", "train.py")):
        assert pod["terminationGracePeriodSeconds"] == 240 + LEEWAY


def test_copies_to_an_object_store_have_their_time_too(capsys: pytest.CaptureFixture[str]) -> None:
    (pod,) = pods(printed(capsys, "--", "--objects", "s3://bucket/gpt", "train.py"))
    assert pod["terminationGracePeriodSeconds"] == 60 + 600 + LEEWAY


def mebibytes(pod: dict[str, Any]) -> int:
    return int(pod["containers"][0]["resources"]["limits"]["memory"].removesuffix("Mi"))


def test_the_limit_of_memory_has_room_for_the_tier_and_for_shared_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (without,) = pods(printed(capsys, "--", "train.py"))
    tier = ("--memory-tier", "peer", "--memory-limit", "65536")
    (with_tier,) = pods(printed(capsys, "--", *tier, "train.py"))
    (with_room,) = pods(printed(capsys, "--shared-memory", "32", "--", "train.py"))
    assert mebibytes(with_tier) - mebibytes(without) == 65536
    assert mebibytes(with_room) - mebibytes(without) == (32 - 8) * 1024
    assert with_room["volumes"][1]["emptyDir"]["sizeLimit"] == f"{32 * 1024}Mi"
    assert mebibytes(without) > (256 + 8) * 1024
    (off,) = pods(printed(capsys, "--", "--memory-tier", "off", "train.py"))
    assert mebibytes(off) == mebibytes(without)
    assert "--memory-limit" in refused(capsys, "--", "--memory-tier", "peer", "train.py")


def test_hosts_meet_at_the_first_pod(capsys: pytest.CaptureFixture[str]) -> None:
    (pod,) = pods(printed(capsys, "--name", "gpt", "--", "train.py"))
    arguments = " ".join(pod["containers"][0]["args"])
    assert "--master-addr gpt-host-0-0.gpt --master-port 29500" in arguments
    assert pod["containers"][0]["env"][0]["name"] == "PET_NODE_RANK"
    (pod,) = pods(printed(capsys, "--name", "gpt", "--standby", "2", "--", "train.py"))
    arguments = " ".join(pod["containers"][0]["args"])
    assert "--nnodes 4 --rdzv-backend c10d --rdzv-endpoint gpt-host-0-0.gpt:29500" in arguments
    assert "env" not in pod["containers"][0]
    (pod,) = pods(printed(capsys, "--name", "gpt", "--", "--coordination", "etcd://e:2379", "train.py"))
    assert "--rdzv-id gpt" in " ".join(pod["containers"][0]["args"])
    service, job = printed(capsys, "--name", "gpt", "--kind", "job", "--", "train.py")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    template = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert "--master-addr gpt-0.gpt " in " ".join(template["spec"]["containers"][0]["args"])


def test_what_etcd_asks_for_comes_from_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = ("--etcd-ca", "trust", "--etcd-certificate", "own", "--etcd-user", "who")
    run = ("--", "--coordination", "etcd://e:2379", "train.py")
    (pod,) = pods(printed(capsys, *secrets, *run))
    variables = {one["name"]: one for one in pod["containers"][0]["env"]}
    files = {
        f"{mount['mountPath']}/{item['path']}": (source["secret"]["name"], item["key"])
        for mount in pod["containers"][0]["volumeMounts"]
        for volume in pod["volumes"]
        if volume["name"] == mount["name"] == "etcd"
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    named = {name: files[variables[name]["value"]] for name in etcd.FILES}
    assert named == {
        "ETCDCTL_CACERT": ("trust", "ca.crt"),
        "ETCDCTL_CERT": ("own", "tls.crt"),
        "ETCDCTL_KEY": ("own", "tls.key"),
    }
    for name, key in (("ETCDCTL_USER", "username"), ("ETCDCTL_PASSWORD", "password")):
        assert variables[name]["valueFrom"]["secretKeyRef"] == {"name": "who", "key": key}
    (pod,) = pods(printed(capsys, "--etcd-ca", "trust", *run))
    assert [one["name"] for one in pod["containers"][0]["env"]] == ["ETCDCTL_CACERT"]
    (pod,) = pods(printed(capsys, *run))
    assert "env" not in pod["containers"][0]
    assert "etcd" not in [volume["name"] for volume in pod["volumes"]]


@pytest.mark.parametrize(
    "options",
    [
        ["--memory-spill", "/checkpoints"],
        ["--memory-interface", "net1"],
        ["--failure-domains", "/training/domains"],
        ["--fault", "rank=31 step=1 kind=kill"],
    ],
)
def test_what_is_in_the_pod_need_not_be_here(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--memory-tier", "peer", "--memory-limit", "9", *options, "train.py"]
    (pod,) = pods(printed(capsys, "--", *run))
    assert pod["containers"][0]["args"][-len(run) :] == run


@pytest.mark.parametrize(
    ("gpus", "given", "device"),
    [("8", [], "--device cuda"), ("0", [], ""), ("8", ["--device", "softgpu"], "--device softgpu")],
)
def test_a_pod_with_gpus_does_not_train_without(
    gpus: str, given: list[str], device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its driver may be dead, and softgpu would take over in silence."""
    (pod,) = pods(printed(capsys, "--gpus", gpus, "--", *given, "train.py"))
    arguments = pod["containers"][0]["args"]
    assert " ".join(arguments[arguments.index("--device") :][:2] if "--device" in arguments else []) == device


def test_this_machines_own_variables_say_nothing_of_the_pods(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = printed(capsys, "--", "--coordination", "etcd://e", "train.py")
    for name in ("PET_MASTER_ADDR", "PET_NODE_RANK", "PET_NNODES"):
        monkeypatch.setenv(name, "7")
    assert printed(capsys, "--", "--coordination", "etcd://e", "train.py") == expected


def test_an_argument_comes_to_the_script_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    (pod,) = pods(printed(capsys, "--", "train.py", "two\nlines: 1", "$(HOME) $$ $1"))
    assert pod["containers"][0]["args"][-2] == "two\nlines: 1"
    assert pod["containers"][0]["args"][-1] == "$$(HOME) $$$$ $$1"  # of which Kubernetes makes one $ each


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_kueue_finds_its_queue(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    *_, manifest = printed(capsys, "--kind", kind, "--queue", "research", "--", "train.py")
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "after `--`"),
        (["--", "--nnodes", "2", "train.py"], "--nodes says it here"),
        (["--", "--checkpoint-dir", "/tmp", "train.py"], "--claim says it here"),
        (["--kind", "trainjob", "--standby", "1", "--", "train.py"], "none stands by"),
        (["--kind", "pytorchjob", "--", "--coordination", "etcd://e:2379", "train.py"], "--coordination"),
        (["--kind", "job", "--in-place-restart", "--", "train.py"], "only --kind jobset"),
        (["--name", "Gpt", "--", "train.py"], "small letters"),
        (["--", "--no-such-option", "train.py"], "--no-such-option"),
        (["train.py"], "unrecognized arguments: train.py; after `--`"),
        (["--", "--local-addr", "10.0.0.1", "train.py"], "the pod says it here"),
        (["--", "--min-hosts", "4", "train.py"], "it is from 2 to"),
        (["--", "--standby", "train.py"], "--standby is not for after `--`: --standby N says it here"),
        (["--standby", "-1", "--", "train.py"], "from 0 to"),
        (["--claim", "My Saves", "--", "train.py"], "'My Saves': a name in Kubernetes"),
        (["--secret", "s/t", "--", "train.py"], "'s/t': a name in Kubernetes"),
        (["--queue", "", "--", "train.py"], "'': a name in Kubernetes"),
        (["--image", "gpt :1", "--", "train.py"], "'gpt :1' is no name of an image"),
        (["--claim", "a..b", "--", "train.py"], "'a..b': a name in Kubernetes"),
        (["--queue", "q" * 64, "--", "train.py"], "a name in Kubernetes"),
        (["--nodes", "1", "--", "--coordination", "etcd://e", "train.py"], "a job on one host"),
        (["--nodes", "1", "--standby", "1", "--", "train.py"], "--standby: a job on one host"),
        (["--standby", "2", "--", "--max-standby", "1", "train.py"], "less than --standby 2"),
        (["--etcd-user", "who", "--", "train.py"], "go with `-- --coordination etcd://...`"),
        (["--", "--suspendable", "train.py"], "--suspendable needs root"),
        (["--", "--mode", "transparent", "--snapshot-every", "9", "train.py"], "--snapshot-every needs root"),
        (["--", "--mode", "transparent", "--broken-device", "move", "train.py"], "move needs root"),
        (["--", "--page", "0.0.0.0:9400", "train.py"], "9400 is the metrics' port"),
        (
            ["--", "--log-dir", "/logs", "train.py"],
            "--log-dir /logs: a pod can write to /checkpoints/ and /tmp/",
        ),
        (
            ["--", "--coordination", "etcd://e", "--min-hosts", "2", "train.py"],
            "--min-hosts: not with --coordination",
        ),
        (["--", "--signals-to-handle", "NOPE", "train.py"], "there is no signal 'NOPE'"),
        (["--", "--monitor-interval", "0", "train.py"], "--monitor-interval must be more than 0"),
        (["--", "--fault", "rank=32 step=1 kind=kill", "train.py"], "the ranks are 0 to 31"),
        (
            ["--", "--rdzv-conf", "join_timeout=soon", "train.py"],
            "join_timeout=soon: it is a number of seconds",
        ),
        (["--", "--tee", "9", "train.py"], "9 does not match"),
        (["--gpus", "0", "--", "--device", "cuda", "train.py"], "--gpus 0: there is none for --device cuda"),
        (
            ["--", "--memory-tier", "peer", "--memory-limit", "9", "--memory-spill", "/spill", "train.py"],
            "--memory-spill /spill: a pod can write to /checkpoints/ and /tmp/",
        ),
    ],
)
def test_what_does_not_fit_is_refused_here_and_not_by_the_cluster(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(capsys, *arguments)
