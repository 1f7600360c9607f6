"""`clipper dashboard`: a link that opens the dashboard."""

import click

from clipper.cli.server_command import ServerCommand, with_server


@click.command(short_help="Print a link that opens the dashboard.")
@with_server
def dashboard(command: ServerCommand) -> None:
    """Print a link that opens the dashboard of a running server in a browser.

    Where the page needs http.token, the link gives it to whoever opens it first, within an hour.

    \b
    clipper dashboard
    """
    server = command.server
    found = server.request("POST", "/admin/dashboard/link")
    url = f"{server.url}{found['path']}"
    command.output.show({"url": url}, lambda: url)
