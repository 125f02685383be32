"""Connection settings of a client."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from baton.client.retries import Retries, Tries
from baton.core.errors import InvalidConfig
from baton.rpc.security.tls import TlsConfig
from baton.rpc.security.token import authorization, check_token

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """Address, deadline, TLS, token and retries of a client."""

    address: str
    timeout_s: float | None
    tls: TlsConfig
    token: str | None = field(repr=False)
    retries: Retries

    def __post_init__(self) -> None:
        if self.tls.cert is not None and not self.tls.dials:
            raise InvalidConfig("a client with tls.cert also needs tls.ca, to verify the server")
        if self.token is not None:
            check_token(self.token, "the token")
            if not self.tls.dials:
                log.warning("the token is sent to %s in plain text; set tls.ca", self.address)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else (authorization(self.token),)

    def tries(self, timeout_s: float | None = None) -> Tries:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return Tries(self.address, self.tls, self.retries, limit_s)
