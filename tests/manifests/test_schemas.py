"""Every manifest of every overlay, alone and with each component, is one that an API server would take."""

import pytest

from tests.manifests.overlays import STACKS, Document, stack
from tests.manifests.schemas import Crds, builtin_faults

CUSTOM_GROUPS = {
    "gateway.networking.k8s.io",
    "inference.networking.k8s.io",
    "networking.istio.io",
    "gateway.envoyproxy.io",
    "keda.sh",
    "monitoring.coreos.com",
}


def is_custom(document: Document) -> bool:
    return document["apiVersion"].split("/")[0] in CUSTOM_GROUPS


def distinct() -> list[tuple[str, Document]]:
    """Each manifest once, with the overlay where it was seen first."""
    seen: dict[str, tuple[str, Document]] = {}
    for names in STACKS:
        overlay = stack(*names)
        for document in overlay.documents:
            seen.setdefault(repr(document), (overlay.name, document))
    return list(seen.values())


def title(where: str, document: Document) -> str:
    return f"{where}: {document['kind']} {document['metadata']['name']}"


def test_built_in_kinds_are_valid_to_the_last_field() -> None:
    builtin = [(where, document) for where, document in distinct() if not is_custom(document)]
    assert len(builtin) > 40
    found = {title(where, document): faults for where, document in builtin if (faults := builtin_faults(document))}
    assert found == {}


@pytest.mark.crds
def test_other_kinds_are_valid_by_their_crd_and_its_rules(crds: Crds) -> None:
    custom = [(where, document) for where, document in distinct() if is_custom(document)]
    assert len({document["kind"] for _, document in custom}) >= 10
    assert [title(*each) for each in custom if each[1] not in crds] == []
    found = {title(where, document): faults for where, document in custom if (faults := crds.faults(document))}
    assert found == {}
    assert crds.rules > 100
