"""Settings: read from the environment, every fault told at once, secrets never shown."""

import os
from collections.abc import Iterator

import nkeys
import pytest
from pydantic import Field, ValidationError
from pydantic_settings import SettingsConfigDict

from shared.errors import ConfigurationError
from shared.settings import (
    NatsSettings,
    PositiveMs,
    RedisKind,
    RedisSettings,
    RedisTarget,
    ServiceSettings,
    TelemetrySettings,
    is_loopback,
    load,
    redis_target,
)


class Example(ServiceSettings):
    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LEADTIME_EXAMPLE_")

    deadline_ms: PositiveMs = 40.0
    names: list[str] = Field(default_factory=list)
    nats: NatsSettings = Field(default_factory=NatsSettings)
    redis: RedisSettings = Field(default_factory=RedisSettings)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch) -> Iterator[None]:
    for variable in list(os.environ):
        if variable.upper().startswith("LEADTIME_"):
            monkeypatch.delenv(variable)
    return


@pytest.fixture
def environment(monkeypatch):
    def put(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


def faults() -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load(Example)
    return str(caught.value).splitlines()


def test_defaults_are_enough_on_loopback():
    settings = load(Example)
    assert settings.pool == "default"
    assert settings.http_host == "127.0.0.1"
    assert settings.redis.key is None
    assert settings.nats.connect_options()["servers"] == ["nats://127.0.0.1:4222"]


def test_values_come_from_the_environment_whatever_the_case(environment):
    environment(LEADTIME_EXAMPLE_POOL="chat", leadtime_example_http_port="8080", LEADTIME_LOG_LEVEL="debug")
    settings = load(Example)
    assert (settings.pool, settings.http_port, settings.telemetry.level) == ("chat", 8080, "debug")


def test_settings_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        load(Example).pool = "other"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("LEADTIME_EXAMPLE_HTTP_PORT", "65536", "less than or equal to 65535"),
        ("LEADTIME_EXAMPLE_HTTP_PORT", "-1", "greater than or equal to 0"),
        ("LEADTIME_EXAMPLE_HTTP_PORT", "http", "valid integer"),
        ("LEADTIME_EXAMPLE_DEADLINE_MS", "0", "greater than 0"),
        ("LEADTIME_EXAMPLE_POOL", "Chat!", "DNS label"),
        ("LEADTIME_EXAMPLE_NAMES", "a,b", "found text that isn't JSON"),
        ("LEADTIME_EXAMPLE_TELEMETRY", "loud", "found text that isn't JSON"),
        ("LEADTIME_LOG_LEVEL", "loud", "debug|info|warning|error"),
        ("LEADTIME_LOG_FORMAT", "xml", "json|console"),
        ("LEADTIME_REDIS_SIGNING_KEY", "short", "at least 16 characters"),
        ("LEADTIME_NATS_TLS_CA_FILE", "/no/such/file", "does not point to a file"),
    ],
)
def test_a_fault_names_the_variable_and_what_is_allowed(environment, variable, value, said):
    environment(**{variable: value})
    [fault] = faults()
    assert fault.startswith(f"{variable}: ")
    assert said in fault
    assert "error" not in fault.replace("debug|info|warning|error", "")


def test_a_number_that_is_none_is_told_and_a_secret_is_not(environment):
    environment(LEADTIME_EXAMPLE_HTTP_PORT="65536", LEADTIME_REDIS_SIGNING_KEY="123456")
    told = "\n".join(faults())
    assert "LEADTIME_EXAMPLE_HTTP_PORT: found 65536; allowed: less than or equal to 65535" in told
    assert "LEADTIME_REDIS_SIGNING_KEY: " in told
    assert "123456" not in told


@pytest.mark.parametrize("servers", ["", " ", "nats://a:4222,", "http://a:4222", "nats://a:x", "nats://a:0", "nats://"])
def test_nats_servers_that_no_client_can_reach_are_refused_at_the_start(environment, servers):
    environment(LEADTIME_NATS_SERVERS=servers)
    [fault] = faults()
    assert fault.startswith("LEADTIME_NATS_SERVERS: ")
    assert "allowed: nats://host:port" in fault


@pytest.mark.parametrize("servers", ["a:4222", "nats://u:p@a", "tls://a:4222, nats://[::1]:4222", "ws://a"])
def test_nats_servers_as_its_clients_take_them(environment, servers):
    environment(LEADTIME_NATS_SERVERS=servers)
    assert load(Example).nats.servers == servers


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:6379", "127.0.0.1:6379", "redis://[::1/0", "redis://127.0.0.1:secret", "redis:///0", "unix://"],
)
def test_a_redis_url_must_be_one(environment, url):
    environment(LEADTIME_REDIS_URL=url)
    [fault] = faults()
    assert fault.startswith("LEADTIME_REDIS_*: ")
    assert "secret" not in fault


def test_a_field_of_a_block_given_as_json_is_named_by_its_path(environment):
    environment(LEADTIME_EXAMPLE_TELEMETRY='{"level": "loud"}')
    [fault] = faults()
    assert fault.startswith("LEADTIME_EXAMPLE_TELEMETRY__LEVEL: ")


def test_a_block_can_be_given_whole_as_json(environment):
    environment(LEADTIME_EXAMPLE_REDIS='{"url": "unix:///run/redis.sock"}', LEADTIME_EXAMPLE_HTTP_PORT="x")
    [fault] = faults()
    assert fault.startswith("LEADTIME_EXAMPLE_HTTP_PORT")
    environment(LEADTIME_EXAMPLE_HTTP_PORT="1")
    assert load(Example).redis.url == "unix:///run/redis.sock"


def test_every_fault_of_every_block_is_told_at_once(environment):
    environment(
        LEADTIME_EXAMPLE_HTTP_PORT="x",
        LEADTIME_EXAMPLE_POOL="Chat!",
        LEADTIME_REDIS_URL="http://x",
        LEADTIME_LOG_LEVEL="loud",
        LEADTIME_EXAMPLE_TYPO="1",
    )
    assert sorted(fault.split(":")[0] for fault in faults()) == [
        "LEADTIME_EXAMPLE_HTTP_PORT",
        "LEADTIME_EXAMPLE_POOL",
        "LEADTIME_EXAMPLE_TYPO",
        "LEADTIME_LOG_LEVEL",
        "LEADTIME_REDIS_*",
    ]


@pytest.mark.parametrize(
    ("variable", "guess"),
    [
        ("LEADTIME_EXAMPLE_HTTP_PROT", "meant: LEADTIME_EXAMPLE_HTTP_PORT? "),
        ("LEADTIME_NATS_SERVER", "meant: LEADTIME_NATS_SERVERS? "),
        ("leadtime_redis_uri", "meant: LEADTIME_REDIS_URL? "),
        ("LEADTIME_LOG_X", ""),
    ],
)
def test_a_variable_of_ours_that_nobody_reads_is_a_fault_that_tells_the_likely_one(environment, variable, guess):
    environment(**{variable: "1"})
    [fault] = faults()
    assert fault.startswith(f"{variable}: no such setting; {guess}allowed: LEADTIME_")


def test_variables_of_others_are_left_alone(environment):
    environment(LEADTIMES_EXAMPLE="1", LEADTIME_ROUTER_PROFILE="x", NATS_SERVERS="x")
    load(Example)


def test_no_fault_and_no_repr_shows_a_secret(environment):
    secrets = {
        "LEADTIME_EXAMPLE_HTTP_TOKEN": "secret-token",
        "LEADTIME_NATS_PASSWORD": "secret-nats",
        "LEADTIME_REDIS_PASSWORD": "secret-redis",
        "LEADTIME_REDIS_SIGNING_KEY": "secret-signing-key",
    }
    environment(**secrets)
    shown = repr(load(Example))
    environment(LEADTIME_EXAMPLE_HTTP_PORT="x", LEADTIME_REDIS_SIGNING_KEY="secret-short")
    shown += " ".join(faults())
    assert "secret-" not in shown


@pytest.mark.parametrize(
    ("url", "needed"),
    [
        ("redis://127.0.0.1:6379/0", False),
        ("redis://localhost/0", False),
        ("redis://[::1]:6379/0", False),
        ("unix:///run/redis.sock", False),
        ("redis://redis:6379/0", True),
        ("rediss://10.0.0.7:6379/0", True),
    ],
)
def test_a_signing_key_is_needed_beyond_loopback(environment, url, needed):
    environment(LEADTIME_REDIS_URL=url)
    if needed:
        [fault] = faults()
        assert "signing_key is needed" in fault
        environment(LEADTIME_REDIS_SIGNING_KEY="0123456789abcdef")
        assert load(Example).redis.key == b"0123456789abcdef"
    else:
        assert load(Example).redis.key is None


def test_options_of_the_redis_client(environment):
    environment(LEADTIME_REDIS_USERNAME="router", LEADTIME_REDIS_PASSWORD="pw")
    options = load(Example).redis.client_options()
    assert (options["username"], options["password"]) == ("router", "pw")
    assert options["protocol"] == 2
    assert options["socket_keepalive"]
    environment(LEADTIME_REDIS_URL="unix:///run/redis.sock")
    assert "socket_keepalive" not in load(Example).redis.client_options()


def test_options_of_the_nats_client(environment, tmp_path):
    seed = nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER).decode()
    credentials = tmp_path / "router.creds"
    credentials.write_text(f"--BEGIN NATS USER JWT--\neyJ\n--BEGIN USER NKEY SEED--\n{seed}\n", "utf-8")
    environment(
        LEADTIME_NATS_SERVERS="nats://a:4222, tls://b:4222",
        LEADTIME_NATS_USER="router",
        LEADTIME_NATS_PASSWORD="pw",
        LEADTIME_NATS_CREDENTIALS_FILE=str(credentials),
    )
    options = load(Example).nats.connect_options()
    assert options["servers"] == ["nats://a:4222", "tls://b:4222"]
    assert (options["user"], options["password"]) == ("router", "pw")
    assert options["user_credentials"] == str(credentials)
    assert options["max_reconnect_attempts"] == -1
    assert "tls" not in options


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("/run/leadtime.sock", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_what_is_loopback(host, expected):
    assert is_loopback(host) is expected


def test_the_logging_block_has_the_quiet_defaults():
    assert (TelemetrySettings().level, TelemetrySettings().format) == ("info", "json")


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://127.0.0.1:7/3", RedisTarget(RedisKind.SERVER, (("127.0.0.1", 7),), tls=False)),
        ("rediss://store", RedisTarget(RedisKind.SERVER, (("store", 6379),), tls=True)),
        ("unix:///run/redis.sock", RedisTarget(RedisKind.SOCKET, (("localhost", 0),), tls=False)),
        (
            "redis+sentinel://a:1,b/leadtime/2",
            RedisTarget(RedisKind.SENTINEL, (("a", 1), ("b", 26379)), tls=False, master="leadtime", database=2),
        ),
        ("rediss+sentinel://a/m", RedisTarget(RedisKind.SENTINEL, (("a", 26379),), tls=True, master="m")),
        ("redis+cluster://a:1,[::1]:2", RedisTarget(RedisKind.CLUSTER, (("a", 1), ("::1", 2)), tls=False)),
        ("rediss+cluster://a/0", RedisTarget(RedisKind.CLUSTER, (("a", 6379),), tls=True)),
    ],
)
def test_every_kind_of_redis_has_a_url(url, target):
    assert redis_target(url) == target


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://a", "scheme"),
        ("redis+proxy://a", "scheme"),
        ("redis+sentinel://a", "name of the master"),
        ("redis+sentinel:///m", "no host"),
        ("redis+sentinel://a/m/x", "no number"),
        ("redis+sentinel://a:99999/m", "port"),
        ("redis+cluster://user:secret@a", "settings of their own"),
        ("redis+cluster://a/1", "only 0"),
        ("redis+cluster://a:0", "port 0"),
    ],
)
def test_a_redis_url_that_cannot_work_says_why_and_keeps_its_password(url, says):
    with pytest.raises(ValidationError) as caught:
        RedisSettings(url=url)
    assert says in str(caught.value.errors()[0]["msg"])
    assert "secret" not in caught.value.errors()[0]["msg"]


def test_beyond_loopback_every_kind_of_redis_needs_a_signing_key():
    for url in ("redis+sentinel://127.0.0.1,10.0.0.1/m", "redis+cluster://10.0.0.1"):
        with pytest.raises(ValidationError, match="signing_key"):
            RedisSettings(url=url)
        RedisSettings(url=url, signing_key="sixteen letters!")
    RedisSettings(url="redis+sentinel://127.0.0.1,localhost/m")


@pytest.fixture
def secrets(tmp_path, environment):
    environment(LEADTIME_SECRETS_DIR=str(tmp_path))
    return tmp_path


def test_files_of_the_secrets_directory_are_read_as_variables_and_leave_the_environment_alone(secrets):
    (secrets / "LEADTIME_EXAMPLE_HTTP_TOKEN").write_text("from a file\n")
    (secrets / "LEADTIME_REDIS_SIGNING_KEY").write_text("0123456789abcdef")
    (secrets / "LEADTIME_OTHER_HTTP_TOKEN").write_text("another service's")
    settings = load(Example)
    assert settings.http_token is not None
    assert settings.http_token.get_secret_value() == "from a file"
    assert settings.redis.key == b"0123456789abcdef"
    assert "LEADTIME_EXAMPLE_HTTP_TOKEN" not in os.environ


def test_the_environment_wins_over_a_secret_file(secrets, environment):
    (secrets / "LEADTIME_EXAMPLE_HTTP_TOKEN").write_text("file")
    environment(LEADTIME_EXAMPLE_HTTP_TOKEN="environment")
    token = load(Example).http_token
    assert token is not None
    assert token.get_secret_value() == "environment"


def test_a_mounted_kubernetes_secret_is_read_through_its_links(secrets):
    versioned = secrets / "..2026_01_01"
    versioned.mkdir()
    (versioned / "LEADTIME_EXAMPLE_POOL").write_text("chat")
    (secrets / "..data").symlink_to(versioned)
    (secrets / "LEADTIME_EXAMPLE_POOL").symlink_to(secrets / "..data" / "LEADTIME_EXAMPLE_POOL")
    assert load(Example).pool == "chat"


def test_a_secret_of_no_setting_or_of_a_wrong_value_stops_the_start_without_its_text(secrets):
    (secrets / "LEADTIME_EXAMPLE_HTTP_TOKN").write_text("hunter2")
    (secrets / "LEADTIME_REDIS_SIGNING_KEY").write_text("hunter2")
    told = faults()
    assert any("LEADTIME_EXAMPLE_HTTP_TOKN: no such setting" in line for line in told)
    assert any("at least 16 characters" in line for line in told)
    assert not any("hunter2" in line for line in told)


def test_a_secrets_directory_that_cant_be_read_stops_the_start(environment, tmp_path):
    environment(LEADTIME_SECRETS_DIR=str(tmp_path / "absent"))
    assert faults() == [f"LEADTIME_SECRETS_DIR: can't read '{tmp_path / 'absent'}': No such file or directory"]
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    environment(LEADTIME_SECRETS_DIR=str(tmp_path))
    assert faults() == [f"LEADTIME_SECRETS_DIR: a file in '{tmp_path}' isn't UTF-8 text"]
    (tmp_path / "binary").write_bytes(b"x" * 70_000)
    assert faults() == ["LEADTIME_SECRETS_DIR: binary is over 65536 bytes"]
