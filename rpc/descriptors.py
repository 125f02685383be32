"""File descriptors of a process: raises the soft limit and divides it between servers."""

from __future__ import annotations

import logging
import resource

# Upper bound of the soft limit, above what any Baton process needs, if the hard limit is higher.
MAX_DESCRIPTORS = 1 << 16
# For model files, UCX, traces and connections to nodes.
MIN_RESERVED = 64
RESERVED_SHARE = 4  # one in four of all descriptors
NUM_SERVERS = 2  # gRPC and HTTP
MIN_CONNECTIONS, MAX_CONNECTIONS = 16, 4096

log = logging.getLogger(__name__)


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, up to MAX_DESCRIPTORS. Return the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of %d open files stays as it is: %s", soft, error)
    return descriptor_limit()


def descriptor_limit() -> int:
    """Return the soft limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def max_connections(num_descriptors: int) -> int:
    """Return the connection limit per server. Both servers together leave a reserve."""
    reserved = max(MIN_RESERVED, num_descriptors // RESERVED_SHARE)
    share = (num_descriptors - reserved) // NUM_SERVERS
    return max(MIN_CONNECTIONS, min(share, MAX_CONNECTIONS))
