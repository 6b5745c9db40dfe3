"""The settings of a server: a run's settings, and the keys that conf/server.yaml adds."""

from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from cbatch import SLO, ConfigError
from cbatch.request_spec import NO_SLO
from cbatch.validation import Give, check, not_negative, positive, read, whole
from experiments.keys import key_of
from experiments.settings.batch import is_auto
from experiments.settings.settings import Composed, Keys, Settings, Tokens, read_settings
from experiments.workloads.base import SamplingKeys

_Count = Annotated[int, whole(1)]
_Address = Annotated[str, Field(min_length=1), Give("an address, as 127.0.0.1, or 0.0.0.0 for all interfaces")]


def _secret(value: object) -> object:
    """Refuses a value that is not text, without showing it: it is a secret, and its text may differ from what was given (1e5 becomes 100000.0)."""
    if not value or not isinstance(value, str):
        raise ValueError("give a text that is not empty, digits in quotes as in 'api_key=\"123\"'")
    return value


_Secret = Annotated[str, BeforeValidator(_secret)]


@dataclass(frozen=True, kw_only=True, repr=False)
class Live(SamplingKeys):
    """The workload of a server: its clients' requests. The keys are defaults for fields that a request omits."""

    requests: ClassVar[tuple[()]] = ()  # no request is known in advance
    slo: SLO = NO_SLO

    def __post_init__(self) -> None:
        check(self, "workload.")


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """The root keys that only a server has. conf/server.yaml explains them."""

    port: Annotated[int, whole(0, 65535)]
    bind: _Address
    api_key: _Secret | None
    time_scale: Annotated[float, positive("simulated seconds per second")]
    max_request_tokens: Tokens
    max_new_tokens: _Count
    max_open: _Count
    full_status: Annotated[Literal[503, 429], Give("503 or 429")]
    max_body: _Count
    drain_seconds: Annotated[float, not_negative("seconds")]


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Settings):
    """The settings of a server. A server's folder is read like a run's, and stores no key of `ServerKeys`."""

    server: ServerKeys
    without_effect: ClassVar[tuple[str, ...]] = (*Keys.without_effect, "server")

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest request."""
        return min(self.server.max_request_tokens or 8192, self.model.max_positions)


def read_server_settings(composed: Composed) -> ServerSettings:
    """Returns the settings of a server. Raises like `read_settings`, and ConfigError for settings that a server does not support.

    The workload's name contains the time: two runs serve different requests, so they are not replications of each other.
    """
    if (workload := composed.choices["workload"]) != "None":
        raise ConfigError(f"workload={workload}: clients send a server's requests; leave it out")
    if is_auto(composed.keys):
        raise ConfigError("batch=auto: the requests of a server are not known; give batch=N")
    names = {field.name for field in fields(ServerKeys)}
    server = read(ServerKeys, {key: value for key, value in composed.keys.items() if key in names})
    of_run = replace(
        composed,
        keys={key: value for key, value in composed.keys.items() if key not in names},
        overrides=[text for text in composed.overrides if key_of(text) not in names],
        choices={**composed.choices, "workload": f"live {datetime.now():%Y-%m-%d %H:%M:%S}"},
    )
    settings = read_settings(of_run)
    if server.time_scale != 1 and not settings.backend.simulated:
        raise ConfigError(f"time_scale={server.time_scale:g}: real tokens take real time; give 1, or backend=sim")
    if settings.stream or settings.bounds:
        raise ConfigError("stream, bounds: need a workload known in advance; give false")
    if settings.autoscale is not None:
        raise ConfigError("autoscale: a server's number of replicas is fixed; leave it out")
    return ServerSettings(**vars(settings), server=server)
