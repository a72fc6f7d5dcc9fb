"""The schemas of Kubernetes' custom resources, as jsonschema takes them: what they don't name is refused."""

from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]


def read(folder: Path) -> dict[tuple[str, str], Schema]:
    """Return the schema of each version and kind whose CustomResourceDefinition lies in the folder."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        spec = yaml.safe_load(file.read_text())["spec"]
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
