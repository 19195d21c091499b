"""The words in which Envoy's messages are written as JSON: typed extensions, addresses, durations. Pure."""

from typing import Any, Final

from deploy.local.envoy.config import Address

_TYPE: Final = "type.googleapis.com/envoy."


def named(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "typed_config": config}


def typed(kind: str, **fields: Any) -> dict[str, Any]:
    return {"@type": _TYPE + kind, **fields}


def socket(address: Address) -> dict[str, Any]:
    return {"socket_address": {"address": address.host, "port_value": address.port}}


def duration(seconds: float) -> str:
    """Protobuf's JSON form of a duration."""
    return f"{seconds:g}s"


def variable(name: str | None) -> str | None:
    """Envoy's word for a variable of its own environment."""
    return None if name is None else f"%ENVIRONMENT({name})%"


def other_host() -> dict[str, Any]:
    """Try again elsewhere than before."""
    return named(
        "envoy.retry_host_predicates.previous_hosts",
        typed("extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"),
    )
