"""The schemas of Kubernetes' custom resources, as jsonschema takes them: what they don't name is refused.

crds/ has the CustomResourceDefinitions of JobSet (kubernetes-sigs/jobset), TrainJob and TrainingRuntime
(kubeflow/trainer) and PyTorchJob (kubeflow/training-operator), all under the Apache License 2.0, as JSON and
without descriptions. KUBERNETES_CRDS may name a folder with others as they are published, in YAML.
"""

import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]


def _definitions() -> Iterator[dict[str, Any]]:
    for file in sorted(Path(__file__).with_name("crds").glob("*.json.xz")):
        yield json.loads(lzma.decompress(file.read_bytes()))
    if folder := os.environ.get("KUBERNETES_CRDS"):
        for file in sorted(Path(folder).glob("*.yaml")):
            yield yaml.safe_load(file.read_text())


def read() -> dict[tuple[str, str], Schema]:
    """Return the schema of each version and kind of which there is a CustomResourceDefinition."""
    found = {}
    for definition in _definitions():
        spec = definition["spec"]
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


def strict(schema: Schema) -> Schema:
    """Return the schema in JSON Schema's words, without fields that it does not name."""
    result = {key: value for key, value in schema.items() if key not in ("properties", "items", "format")}
    if "properties" in schema:
        result["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    elif isinstance(inner := schema.get("additionalProperties"), dict):
        result["additionalProperties"] = strict(inner)
    if "items" in schema:
        result["items"] = strict(schema["items"])
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    return result
