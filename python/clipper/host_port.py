"""HOST:PORT, with brackets around an IPv6 address: without them nobody knows where it ends."""


def join_host_port(host: str, port: int | str) -> str:
    """Return HOST:PORT. host: a name or an IP address, an IPv6 one with or without brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
