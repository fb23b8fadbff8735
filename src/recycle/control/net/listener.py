"""The socket on which a coordinator listens."""

import errno
import socket

from recycle.core.errors import PortInUse, UserError

# All workers of a large job may connect at once.
BACKLOG = 4096


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 is any free one."""
    listener = reserve_address(host, port)
    listener.listen(BACKLOG)
    return listener


def reserve_address(host: str, port: int) -> socket.socket:
    """Return a socket that has this address and does not listen yet: who connects is refused, and tries another coordinator."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise UserError(f"the port is {port!r}, but it must be a whole number from 0 to 65535, where 0 is any free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    elsewhere = f"{host} is no address of this machine: listen on one of its own, or on 0.0.0.0 for all of them"
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as problem:
        listener.close()
        if isinstance(problem, socket.gaierror) or problem.errno == errno.EADDRNOTAVAIL:
            raise UserError(elsewhere) from None
        raise PortInUse(
            f"{host} port {port} cannot be listened on, another program probably does: name a free one, or 0 for any "
            f"({problem.strerror or problem})"
        ) from None
    return listener
