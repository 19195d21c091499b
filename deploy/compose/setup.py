"""Makes what the containers need before they start, by `python -m deploy.compose.setup`: secrets and Envoy's config.

A one-shot service of compose.yaml runs it in the router's image, so Envoy's config comes from the one renderer and from
the same settings that the routers get; nothing rendered is kept in the repository, where it would age. The secrets are
random, made at the first start and kept in a volume, each in a file named like the variable that reads it
(`LEADTIME_SECRETS_DIR`); one that the environment gives is taken instead. Envoy's config holds two of them and is
readable by its group only.

Limits: one Envoy config for all Envoys; plain HTTP to endpoints.
"""

import argparse
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from deploy.local.envoy import Address, EnvoyConfig, RouterAddress, of_router, parse_endpoint, render
from shared.errors import FieldError

HTTP_TOKEN: Final = "LEADTIME_HTTP_TOKEN"  # noqa: S105 - a variable's name
"""The operator's own token for what changes or discloses something; without it one is made."""
SECRETS: Final[Mapping[str, tuple[str, ...]]] = {
    "http": (
        *("LEADTIME_ROUTER_HTTP_TOKEN", "LEADTIME_COLLECTOR_HTTP_TOKEN", "LEADTIME_TRAINER_HTTP_TOKEN"),
        *("LEADTIME_PREDICTOR_HTTP_TOKEN", "LEADTIME_ROUTER_PREDICTOR_TOKEN", "LEADTIME_ROUTER_COLLECTOR_TOKEN"),
    ),
    "extproc": ("LEADTIME_ROUTER_EXTPROC_TOKEN",),
    "als": ("LEADTIME_COLLECTOR_ALS_TOKEN",),
    "signing": ("LEADTIME_REDIS_SIGNING_KEY",),
    "salt": ("LEADTIME_ROUTER_PREFIX_SALT",),
}
"""Each secret, and the settings that are given it."""
_BYTES: Final = 32


def make_secrets(directory: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The secrets by their key in SECRETS: those in `directory`, made where they are missing; `given` comes first."""
    made = {}
    for key, variables in SECRETS.items():
        value = _given(variables, given) or (given.get(HTTP_TOKEN) if key == "http" else None)
        first = directory / variables[0]
        value = value or (first.read_text(encoding="utf-8") if first.exists() else secrets.token_urlsafe(_BYTES))
        for variable in variables:
            write(directory / variable, value, mode=0o600)
        made[key] = value
    return made


def _given(variables: Sequence[str], given: Mapping[str, str]) -> str | None:
    return next((given[variable] for variable in variables if given.get(variable)), None)


def envoy_config(arguments: argparse.Namespace, tokens: Mapping[str, str], given: Mapping[str, str]) -> EnvoyConfig:
    """What Envoy is told; `given` is the routers' environment. Raises FieldError."""
    entries = [entry.strip() for entry in arguments.endpoints.split(",") if entry.strip()]
    return EnvoyConfig(
        endpoints=tuple(parse_endpoint(entry.split(";", 1)[0].strip()) for entry in entries),
        routers=(RouterAddress(_address(arguments.router), arguments.router_health_port),),
        collectors=(_address(arguments.collector),),
        api=(parse_endpoint(arguments.api),) if arguments.api else (),
        listen=_address(arguments.listen),
        admin=_address(arguments.admin),
        collector_token=tokens["als"],
        router_token=tokens["extproc"],
        **of_router(given),
    )


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise FieldError("address", f"'{text[:64]}'", "host:port")
    return Address(host.strip("[]"), int(port))


def write(file: Path, text: str, *, mode: int) -> None:
    """Whole or not at all, and never readable by more than `mode` says."""
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as out:
        out.write(text)
    new.replace(file)


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="deploy.compose.setup", description="Makes secrets and Envoy's config.")
    parser.add_argument("--secrets", type=Path, required=True, help="directory of the secrets")
    parser.add_argument("--show-token", action="store_true", help="print the HTTP token and do nothing else")
    parser.add_argument("--envoy", type=Path, help="file for Envoy's config")
    parser.add_argument("--endpoints", default="", help="model servers, as LEADTIME_ROUTER_ENDPOINTS takes them")
    parser.add_argument("--router", default="router:9002", help="host:port of the routers' ext-proc listeners")
    parser.add_argument("--router-health-port", type=int, default=9003)
    parser.add_argument(
        "--collector", default="collector:9001", help="host:port of the collectors' access-log listeners"
    )
    parser.add_argument("--api", default="", help="http://host:port of an ordinary service under /api")
    parser.add_argument("--listen", default="0.0.0.0:8080", help="where Envoy takes requests")
    parser.add_argument("--admin", default="127.0.0.1:9901", help="Envoy's admin interface, on loopback")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    arguments = arguments_of(words)
    if arguments.show_token:
        sys.stdout.write((arguments.secrets / SECRETS["http"][0]).read_text(encoding="utf-8") + "\n")
        return 0
    try:
        tokens = make_secrets(arguments.secrets, environment)
        if arguments.envoy:
            config = render(envoy_config(arguments, tokens, environment))
            write(arguments.envoy, json.dumps(config, indent=1), mode=0o640)
    except (FieldError, OSError) as error:
        sys.stderr.write(f"deploy.compose.setup: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
