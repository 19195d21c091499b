"""The sources that the settings ask for, and what Kubernetes tells beside endpoints."""

import random
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from services.router.alias_file import alias_table
from services.router.director import Director
from services.router.discovery.endpoints import Lookup, parse_endpoints, parse_ports
from services.router.discovery.file import FileSource
from services.router.discovery.follow import Source
from services.router.discovery.kube_client import KubeConfig, check_files
from services.router.discovery.kube_objects import PoolSpec
from services.router.discovery.kubernetes import KubernetesOptions, KubernetesSource, Rules, own_namespace
from services.router.discovery.names import Dns, NamesConfig, NamesSource
from services.router.policies import Policies
from services.router.request.aliases import ModelAliases
from services.router.request.objectives import Objective, Objectives
from services.router.settings import RouterSettings
from shared.clock import Clock
from shared.errors import ConfigurationError, FieldError


def sources(
    settings: RouterSettings, clock: Clock, registry: CollectorRegistry, rng: random.Random
) -> tuple[list[Source], KubernetesSource | None]:
    """Every source, first the one whose word counts most; and Kubernetes, where it is one of them.

    Raises ConfigurationError where what a pod has to have isn't there: its namespace, token or certificates.
    """
    specs = parse_endpoints(settings.endpoints)
    found: list[Source] = []
    if specs:
        servers = [server.strip() for server in settings.dns_servers.split(",") if server.strip()]
        by_dns = any(spec.lookup is not Lookup.SYSTEM for spec in specs)
        config = NamesConfig(resolve_interval_ms=settings.resolve_interval_s * 1e3)
        dns = Dns(servers, timeout_ms=config.resolve_timeout_ms) if by_dns else None
        found.append(NamesSource(specs, clock=clock, registry=registry, rng=rng, config=config, dns=dns))
    if settings.endpoints_file is not None:
        found.append(FileSource(settings.endpoints_file, clock=clock, registry=registry))
    if not settings.kubernetes_pool and not settings.kubernetes_selector:
        return found, None
    api = KubeConfig(settings.kubernetes_api, settings.kubernetes_token_file, settings.kubernetes_ca_file)
    try:
        check_files(api)
    except FieldError as error:
        raise ConfigurationError(str(error)) from None
    fixed = PoolSpec(settings.kubernetes_selector, parse_ports(settings.kubernetes_ports))
    kubernetes = KubernetesSource(
        KubernetesOptions(
            namespace=settings.kubernetes_namespace or own_namespace(),
            pool=settings.kubernetes_pool,
            fixed=None if settings.kubernetes_pool else fixed,
            hardware_label=settings.kubernetes_hardware_label,
        ),
        api,
        clock=clock,
        registry=registry,
        rng=rng,
    )
    return [*found, kubernetes], kubernetes


def feed(kubernetes: KubernetesSource, director: Director, policies: Policies, settings: RouterSettings) -> None:
    """Hand what Kubernetes says of priorities and model names to the director; the settings' own words come first."""
    own_aliases = alias_table(settings.model_aliases, settings.model_aliases_file)
    told: dict[str, Objective] = {}

    def use_rewrites(rules: Rules) -> None:
        exact, generic = rules
        director.use_aliases(ModelAliases({**exact, **own_aliases}, generic))

    def use_objectives() -> None:
        own = policies.objectives
        director.use_objectives(Objectives({**told, **own.by_name}, own.by_model))

    def on_objectives(found: Mapping[str, int]) -> None:
        told.clear()
        told.update({name: Objective(priority) for name, priority in found.items()})
        use_objectives()

    kubernetes.on_rewrites = use_rewrites
    kubernetes.on_objectives = on_objectives
    policies.on_objectives = lambda _: use_objectives()
