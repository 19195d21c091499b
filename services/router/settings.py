"""The router's settings, from the environment with the prefix LEADTIME_ROUTER_."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.router.alias_file import alias_table
from services.router.discovery.endpoints import parse_endpoints, parse_ports
from services.router.discovery.file import load_listing
from services.router.discovery.kube_client import SERVICE_ACCOUNT
from services.router.objectives_file import read_objectives
from services.router.predict.client import parse_urls
from services.router.request.aliases import ModelAliases
from services.router.request.parse import DEFAULT_MAX_BODY_BYTES
from services.router.restored_name import parse_routes
from services.router.sample_sink import parse_collectors
from services.router.state.table import MAX_CANDIDATES
from shared.settings import (
    NatsSettings,
    Port,
    PositiveMs,
    ReadableFile,
    RedisSettings,
    ServiceSettings,
    is_loopback,
)


class RouterSettings(ServiceSettings):
    """Everything that can be set from outside; units are in the names."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_ROUTER_")

    extproc_host: str = "127.0.0.1"
    """Address of the ext-proc and health listeners."""
    extproc_port: Port = 9002
    extproc_token: SecretStr | None = None
    """Bearer token of Envoy's calls; beyond loopback it is needed, or certificates of clients, or `extproc_open`."""
    extproc_open: bool = False
    """Whether anyone who reaches the ext-proc port may call: only where a mesh or a network policy guards it."""
    health_port: Port = 9003
    """gRPC health: "", liveness, readiness and the ext-proc service's name."""
    tls: Literal["off", "files", "self-signed"] = "off"
    """TLS on the ext-proc port; `self-signed` makes a key at each start, for gateways that don't verify."""
    tls_cert_file: ReadableFile | None = None
    """PEM; with `tls_key_file`, for `tls=files`. Read again when they change."""
    tls_key_file: ReadableFile | None = None
    tls_client_ca_file: ReadableFile | None = None
    """With `tls=files`: only clients with a certificate of this CA may call."""
    endpoints: str = ""
    """Comma-separated model servers: `http://host:port;hardware_class=h100;role=decode`; a name stands for all its
    addresses. `dns://name:port` and `srv://_service._proto.name` ask DNS itself and heed its TTL."""
    dns_servers: str = ""
    """Comma-separated `ip` or `ip:port` for `dns://` and `srv://` entries; empty: the machine's."""
    endpoints_file: ReadableFile | None = None
    """YAML or JSON with more of them, watched; replaced as a whole."""
    kubernetes_pool: str = ""
    """Name of an InferencePool (v1) whose pods are endpoints."""
    kubernetes_selector: str = ""
    """Instead of a pool: a label selector of pods, as `app=vllm,tier=chat`; needs `kubernetes_ports`."""
    kubernetes_ports: str = ""
    """Comma-separated ports of the selector's pods; each is an endpoint."""
    kubernetes_namespace: str = ""
    """Empty: the namespace that this pod runs in."""
    kubernetes_api: str = "https://kubernetes.default.svc"
    kubernetes_token_file: Path | None = SERVICE_ACCOUNT / "token"
    """Read again for each request."""
    kubernetes_ca_file: Path | None = SERVICE_ACCOUNT / "ca.crt"
    kubernetes_hardware_label: str = "leadtime.ai/hardware-class"
    """Label of a pod that names its hardware class; `llm-d.ai/role` is its role."""
    predictors: str = "http://127.0.0.1:8080"
    """Comma-separated URLs of predictors; a name stands for all its addresses. Empty: none."""
    predictor_token: SecretStr | None = None
    """Bearer token that the predictors ask for."""
    ladder: Literal["predictor", "in_process"] = "predictor"
    """Which step of the ladder is tried first."""
    prior: Literal["off", "8b", "70b"] = "8b"
    """Size class of the pool's model for the physics prior, which answers until there is a bundle."""
    profile: str | None = None
    """Name of a preset or of the profile in `profile_file`; without it that file's, else `leadtime`."""
    profile_file: ReadableFile | None = None
    """YAML with a profile of one's own, or an `EndpointPickerConfig`; read again when it changes."""
    decision_budget_ms: PositiveMs = 100.0
    predict_deadline_ms: PositiveMs = 40.0
    """Deadline of one prediction, all replicas together; inside the decision budget."""
    max_body_bytes: Annotated[int, Field(ge=1_024, le=1 << 30)] = DEFAULT_MAX_BODY_BYTES
    """Larger requests get a 413. Envoy's buffer limit is rendered from it."""
    listed_endpoints: Annotated[int, Field(ge=1, le=8)] = 3
    """How many endpoints an answer lists, best first."""
    trust_request_headers: bool | None = None
    """Whether clients' priority, objective and fairness headers are believed; unset: as the profile in force says."""
    objectives: dict[str, Any] = Field(default_factory=dict)
    """JSON: objective name → priority, or {priority, ttft_slo_ms, tpot_slo_ms}, for trusted requests that name one."""
    model_objectives: dict[str, Any] = Field(default_factory=dict)
    """JSON: model → the same, for all its requests that don't say otherwise."""
    objectives_file: ReadableFile | None = None
    """YAML with both tables (`objectives:`, `models:`), joined with the settings; read again when it changes."""
    forward_control_headers: bool = False
    """Whether SLO, objective, priority and other headers for the router go on to the model server."""
    model_aliases: dict[str, str | dict[str, int]] = Field(default_factory=dict)
    """JSON: a client's name for a model → the model, or models by weight: `{"chat": {"llama-a": 9, "llama-b": 1}}`."""
    model_aliases_file: ReadableFile | None = None
    """The same table as YAML; the two are joined, and may not both name an alias."""
    restored_routes: str = ""
    """Comma-separated beginnings of paths (`/v1/chat/,/team/`) whose responses name the model as the client did; Envoy
    has to show their responses to the router (`deploy/local/envoy` renders it)."""
    collectors: str = ""
    """Comma-separated URLs of collectors for the samples of responses that pass through here; empty: none are made."""
    collector_token: SecretStr | None = None
    """Bearer token that the collectors ask for."""
    probe_user_agents: str = "kube-probe/,GoogleHC/,ELB-HealthChecker/,Prometheus/"
    """Comma-separated beginnings of user agents whose requests make no sample."""
    share_ledger: bool = True
    """Whether this router tells the pool's other routers over NATS what it dispatched, and is told."""
    ledger_checks: bool = False
    """For debugging: look for inconsistencies of the ledger once a second."""
    decision_log: Path | None = None
    """File for every decision with its candidates, and outcomes, as JSON lines without prompts: `leadtime evaluate`."""
    decision_log_max_mb: Annotated[float, Field(ge=1, le=100_000)] = 256.0
    """Where that file is put aside (`.1`) for a new one; two are kept."""
    kv_events: str | None = None
    """ZMQ address on which servers may tell of their KV caches (`tcp://127.0.0.1:5557`): they connect, we bind."""
    kv_events_port: Port | None = None
    """Port on which servers publish that themselves (vLLM's `tcp://*:5557`): the router calls on each endpoint there.
    """
    kv_events_replay_port: Port | None = None
    """Port of the servers where missed events can be asked for; without it a gap makes what they said void."""
    kv_events_open: bool = False
    """Whether anyone who reaches that port may publish: needed beyond loopback, where a network policy must guard it.
    """
    prefix_salt: SecretStr | None = None
    """Key of the prefix hashes, the same for all routers of a pool; random without one, and prefixes aren't shared."""
    max_candidates: Annotated[int, Field(ge=0, le=65_536)] = MAX_CANDIDATES
    """How many endpoints of a larger pool one decision looks at: the best by ledger and prefix; 0: all."""
    max_set_aside_share: Annotated[float, Field(ge=0, le=0.5)] = 0.5
    """Of the pool: how many endpoints may be set aside since requests to them fail (one at least, of two); 0: none."""
    max_set_aside_s: Annotated[float, Field(ge=2, le=3_600)] = 60.0
    """The longest time between two requests that try such an endpoint."""
    scrape_timeout_ms: PositiveMs = 1_000.0
    scrape_stale_ms: PositiveMs = 5_000.0
    """Older scraped values count as unknown."""
    resolve_interval_s: Annotated[float, Field(gt=0, le=3_600)] = 10.0
    watchdog_s: Annotated[float, Field(ge=0, le=3_600)] = 10.0
    """A router whose event loop is frozen for so long is ended; 0: never. Requests wait for it meanwhile."""
    lame_duck_s: Annotated[float, Field(ge=0, le=3_600)] = 1.5
    """How long after SIGTERM new requests are still taken, while Envoy's health checks learn of it."""
    drain_s: Annotated[float, Field(ge=0, le=3_600)] = 5.0
    """How long running requests may go on after that."""
    nats: NatsSettings = Field(default_factory=NatsSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)

    @model_validator(mode="after")
    def _one_way_of_kubernetes(self) -> Self:
        if self.kubernetes_pool and (self.kubernetes_selector or self.kubernetes_ports):
            raise ValueError(
                "kubernetes_pool tells selector and ports: kubernetes_selector, kubernetes_ports aren't for it"
            )
        if bool(self.kubernetes_selector) != bool(self.kubernetes_ports):
            raise ValueError("kubernetes_selector and kubernetes_ports are needed together")
        return self

    @field_validator("kubernetes_ports")
    @classmethod
    def _whole_ports(cls, ports: str) -> str:
        parse_ports(ports)
        return ports

    @field_validator("endpoints")
    @classmethod
    def _readable(cls, endpoints: str) -> str:
        parse_endpoints(endpoints)
        return endpoints

    @field_validator("endpoints_file")
    @classmethod
    def _listing(cls, file: Path | None) -> Path | None:
        if file is not None:
            load_listing(file)
        return file

    @field_validator("predictors")
    @classmethod
    def _callable(cls, predictors: str) -> str:
        parse_urls([url.strip() for url in predictors.split(",") if url.strip()])
        return predictors

    @model_validator(mode="after")
    def _files_where_files_are_used(self) -> Self:
        pair = (self.tls_cert_file, self.tls_key_file)
        if self.tls == "files" and None in pair:
            raise ValueError("tls_cert_file and tls_key_file are needed: tls is files")
        if self.tls != "files" and any((*pair, self.tls_client_ca_file)):
            raise ValueError(f"tls_cert_file, tls_key_file and tls_client_ca_file are for tls=files; tls is {self.tls}")
        return self

    @model_validator(mode="after")
    def _guarded_beyond_loopback(self) -> Self:
        guarded = self.extproc_token is not None or self.tls_client_ca_file is not None or self.extproc_open
        if not is_loopback(self.extproc_host) and not guarded:
            raise ValueError("extproc_token, tls_client_ca_file or extproc_open is needed: extproc_host isn't loopback")
        return self

    @field_validator("restored_routes")
    @classmethod
    def _paths(cls, text: str) -> str:
        parse_routes(text)
        return text

    @model_validator(mode="after")
    def _kv_events_guarded(self) -> Self:
        if self.kv_events is None:
            return self
        scheme, _, rest = self.kv_events.partition("://")
        host = rest.rpartition(":")[0].strip("[]")
        if scheme not in {"tcp", "ipc"} or not rest:
            raise ValueError(f"kv_events: found '{self.kv_events[:64]}'; allowed: tcp://HOST:PORT or ipc://PATH")
        if scheme == "tcp" and not is_loopback(host) and not self.kv_events_open:
            raise ValueError("kv_events_open is needed: kv_events isn't on loopback, and ZMQ asks for no credential")
        return self

    @field_validator("collectors")
    @classmethod
    def _urls(cls, text: str) -> str:
        parse_collectors(text)
        return text

    @model_validator(mode="after")
    def _objectives_work(self) -> Self:
        read_objectives(self.objectives, self.model_objectives, self.objectives_file)
        return self

    @model_validator(mode="after")
    def _aliases_work(self) -> Self:
        ModelAliases(alias_table(self.model_aliases, self.model_aliases_file))
        return self
