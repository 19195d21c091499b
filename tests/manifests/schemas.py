"""Whether an API server would take a manifest: built-in kinds by Kubernetes' own schemas, others by their CRD.

A CRD's schema is made strict, as `kubectl apply --validate=strict` is: unknown fields are refused. Its CEL rules run
over the document with defaults filled in, as on a server; rules about changes (`oldSelf`) find nothing in a file.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import celpy
import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from tests.manifests.overlays import Document

KUBERNETES = ("1.30", "1.34")
"""The oldest that the manifests are for (`preStop.sleep`), and a recent one."""


def builtin_faults(document: Document) -> list[str]:
    found = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {'.'.join(map(str, error.path))}: {error.message[:200]}")
    return found


@dataclass(frozen=True)
class _Rule:
    path: str
    text: str
    message: str
    value: Any


class Crds:
    """The CustomResourceDefinitions of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rules = 0
        """CEL rules evaluated so far."""
        self._schemas: dict[tuple[str, str], Document] = {}
        self._programs: dict[str, Any] = {}
        self._cel = celpy.Environment()
        for file in sorted(folder.glob("*.yaml")):
            for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
                if document and document.get("kind") == "CustomResourceDefinition":
                    spec = document["spec"]
                    for version in spec["versions"]:
                        key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                        self._schemas[key] = version["schema"]["openAPIV3Schema"]
        assert self._schemas, f"{folder}: no CustomResourceDefinition"

    def __contains__(self, document: Document) -> bool:
        return (document["apiVersion"], document["kind"]) in self._schemas

    def faults(self, document: Document) -> list[str]:
        """What the schema and its rules have against it."""
        whole = self._schemas[document["apiVersion"], document["kind"]]
        # Nobody writes a status by hand, and some have defaults.
        schema = {**whole, "properties": {name: each for name, each in whole["properties"].items() if name != "status"}}
        filled = copy.deepcopy(document)
        _fill(filled, schema)
        strict = _strict(schema)
        for common in ("apiVersion", "kind", "metadata"):
            strict["properties"][common] = {}
        found = [
            f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"
            for error in Draft202012Validator(strict).iter_errors(filled)
        ]
        return found + [
            f"{rule.path}: {rule.message}" for rule in _rules(filled, schema, document["kind"]) if not self._holds(rule)
        ]

    def _holds(self, rule: _Rule) -> bool:
        program = self._programs.get(rule.text)
        if program is None:
            program = self._programs[rule.text] = self._cel.program(self._cel.compile(rule.text))
        self.rules += 1
        return bool(program.evaluate({"self": celpy.json_to_cel(rule.value)}))


def _strict(schema: Any) -> Any:
    """The schema, with unknown fields refused and Kubernetes' own words translated into JSON Schema's."""
    if not isinstance(schema, dict):
        return schema
    made = {key: value for key, value in schema.items() if key != "format"}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    if made.get("nullable") and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    if "properties" in made:
        made["properties"] = {name: _strict(each) for name, each in made["properties"].items()}
        if not made.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    for place in ("additionalProperties", "items"):
        if isinstance(made.get(place), dict):
            made[place] = _strict(made[place])
    return made


def _inner(value: Any, schema: Document) -> Iterator[tuple[str, Any, Document]]:
    """Parts of a value that have a schema of their own."""
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        other = schema.get("additionalProperties")
        for key, each in value.items():
            inner = properties.get(key) or other
            if isinstance(inner, dict):
                yield f".{key}", each, inner
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, each in enumerate(value):
            yield f"[{index}]", each, schema["items"]


def _fill(value: Any, schema: Document) -> None:
    """Write defaults into `value`, outermost first, as an API server does."""
    if isinstance(value, dict):
        for name, each in (schema.get("properties") or {}).items():
            if name not in value and "default" in each:
                value[name] = copy.deepcopy(each["default"])
    for _, each, inner in _inner(value, schema):
        _fill(each, inner)


def _rules(value: Any, schema: Document, path: str) -> Iterable[_Rule]:
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"]:
            yield _Rule(path, rule["rule"], rule.get("message", rule["rule"]), value)
    for step, each, inner in _inner(value, schema):
        yield from _rules(each, inner, path + step)
