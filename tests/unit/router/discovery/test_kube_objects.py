"""Kubernetes documents: what they say is taken, what is odd is left out."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.discovery.endpoints import Listed
from services.router.discovery.kube_objects import (
    PoolSpec,
    Rewrite,
    Rule,
    alias_rules,
    endpoints,
    objective,
    pod,
    pool_spec,
    rewrite,
)
from services.router.state.roles import Role
from tests.fakes.fake_kube import make_pod

LABEL = "leadtime.ai/hardware-class"
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "status", "spec", "name", "uid", "labels", "poolRef", "rules", "targets", "matches"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)


def listed(*documents, ports=(8000,)):
    pods = [found for document in documents if (found := pod(document, LABEL)) is not None]
    return endpoints(pods, ports)


def test_each_port_of_a_ready_pod_is_an_endpoint_with_role_and_hardware():
    document = make_pod("a", "10.0.0.1", labels={"llm-d.ai/role": "decode", LABEL: "h100"})
    wanted = Listed(2, Role.DECODE, "uid-a")
    assert listed(document, ports=(8000, 8001)) == {"10.0.0.1:8000": wanted, "10.0.0.1:8001": wanted}


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "Pending"},
        {"phase": "Failed", "reason": "Evicted"},
        {"phase": "Succeeded"},
        {"ready": False},
        {"terminating": True},
        {"ip": ""},
        {"ip": "nonsense"},
    ],
)
def test_a_pod_that_cannot_serve_is_no_endpoint(change):
    assert listed(make_pod("a", **{"ip": "10.0.0.1", **change})) == {}


def test_a_reused_address_belongs_to_the_pod_that_started_last():
    old = make_pod("old", "10.0.0.1", started="2026-11-30T10:00:00Z")
    new = make_pod("new", "10.0.0.1", started="2026-11-30T11:00:00Z")
    for order in ((old, new), (new, old)):
        assert listed(*order)["10.0.0.1:8000"].identity == "uid-new"


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ("prefill", Role.PREFILL),
        ("encode", Role.ENCODE),
        ("prefill-decode", Role.BOTH),
        ("cook", Role.BOTH),
        (7, Role.BOTH),
    ],
)
def test_the_roles_of_llm_d_are_known_and_an_unknown_one_is_both(label, role):
    found = pod(make_pod("a", "10.0.0.1", labels={"llm-d.ai/role": label}), LABEL)
    assert found.role is role


def test_an_unknown_hardware_class_is_unknown():
    assert pod(make_pod("a", "10.0.0.1", labels={LABEL: "abacus"}), LABEL).hardware_class == 0


POOL = {
    "spec": {
        "selector": {"matchLabels": {"app": "vllm", "a": "b"}},
        "targetPorts": [{"number": 8000}, {"number": 8001}],
    }
}


def test_an_inference_pool_is_a_selector_and_ports():
    assert pool_spec(POOL) == PoolSpec("a=b,app=vllm", (8000, 8001))
    for part in ("selector", "targetPorts"):
        broken = copy.deepcopy(POOL)
        del broken["spec"][part]
        assert pool_spec(broken) is None


def test_objectives_of_another_pool_are_none_of_ours():
    document = {"metadata": {"name": "chat"}, "spec": {"priority": 5, "poolRef": {"name": "pool"}}}
    assert objective(document, "pool") == ("chat", 5)
    assert objective(document, "other") is None
    del document["spec"]["priority"]
    assert objective(document, "pool") == ("chat", 0)
    document["spec"]["priority"] = "high"
    assert objective(document, "pool") is None


def rewriting(*rules, created="2026-01-01T00:00:00Z", name="r"):
    return rewrite(
        {
            "metadata": {"name": name, "creationTimestamp": created},
            "spec": {"poolRef": {"name": "pool"}, "rules": list(rules)},
        },
        "pool",
    )


def exact(*names):
    return [{"model": {"type": "Exact", "value": name}} for name in names]


def test_a_rewrite_matches_names_and_shares_by_weight():
    found = rewriting(
        {
            "matches": exact("chat", "talk"),
            "targets": [{"modelRewrite": "a", "weight": 9}, {"modelRewrite": "b", "weight": 1}],
        },
        {"targets": [{"modelRewrite": "c"}, {"modelRewrite": "d"}]},
    )
    assert found.rules == (Rule(("chat", "talk"), {"a": 9, "b": 1}), Rule((), {"c": 1, "d": 1}))


def test_where_weights_are_mixed_the_unweighted_are_never_picked():
    found = rewriting(
        {"matches": exact("chat"), "targets": [{"modelRewrite": "a", "weight": 3}, {"modelRewrite": "b"}]}
    )
    assert found.rules == (Rule(("chat",), {"a": 3}),)


@pytest.mark.parametrize(
    "rule",
    [
        {"matches": [{"model": {"type": "Prefix", "value": "c"}}], "targets": [{"modelRewrite": "a"}]},
        {"matches": [{"model": {}}], "targets": [{"modelRewrite": "a"}]},
        {"matches": ["chat"], "targets": [{"modelRewrite": "a"}]},
        {"matches": exact("chat"), "targets": []},
        {"matches": exact("chat"), "targets": [{"modelRewrite": "a", "weight": 0}]},
        {"matches": exact("chat"), "targets": [{"modelRewrite": ""}]},
    ],
)
def test_a_rule_that_cannot_be_followed_is_left_out_and_never_becomes_one_for_all(rule):
    assert rewriting(rule).rules == ()


def test_exact_rules_come_before_generic_ones_and_older_objects_before_newer():
    older = Rewrite("2026-01-01T00:00:00Z", "b", (Rule((), {"old": 1}), Rule(("chat",), {"first": 1})))
    newer = Rewrite("2026-02-01T00:00:00Z", "a", (Rule(("chat", "more"), {"second": 1}), Rule((), {"new": 1})))
    for order in ((older, newer), (newer, older)):
        assert alias_rules(order) == ({"chat": {"first": 1}, "more": {"second": 1}}, {"old": 1})


@given(ANYTHING)
def test_no_document_whatever_is_an_error(document):
    pod(document, LABEL)
    pool_spec(document)
    objective(document, "pool")
    rewrite(document, "pool")
