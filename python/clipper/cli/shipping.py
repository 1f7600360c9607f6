"""`clipper export dockerfile`: models as images, for builders and clusters of one's own."""

import tempfile
from pathlib import Path

import click
import msgspec

from clipper.cli.asking import Asking, talks
from clipper.errors import UnknownModel, UnknownVersion
from clipper.manage.moving import State, read
from clipper.types import Model, VersionedModel


@click.command(short_help="A model as the Dockerfile of its image.")
@click.argument("model", metavar="NAME[:VERSION]")
@click.argument("folder", metavar="[FOLDER]", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--base", metavar="IMAGE", default="", help="The Python image to start from.  [python:VERSION-slim-bookworm]")
@talks
def dockerfile(ask: Asking, model: str, folder: Path | None, base: str) -> None:
    """Print the Dockerfile of a model, or write it into FOLDER with all that it is built from.

    Packages are pinned to what is installed here. The image holds no secret: its container reads the token from a file.

    \b
    clipper export dockerfile svm
    clipper export dockerfile svm:3 svm-image && docker build -t svm:3 svm-image
    """
    from clipper.deploy.deployer import spec_of
    from clipper.deploy.image import image_of
    from clipper.deploy.needs import needs_of

    state = read(ask.server.export_state())
    with tempfile.TemporaryDirectory(prefix="clipper-image-") as place:
        found = placed(chosen(state, model), state, Path(place))
        image = image_of(spec_of(found), needs_of(found), base)
    if folder is None:
        click.echo(image.dockerfile, nl=False)
        return
    image.write(folder)
    said = {"folder": str(folder), "image": image.name, "files": sorted(image.files)}
    ask.show(said, lambda: f"wrote {len(image.files)} files to {folder}\nbuild it: docker build -t {image.name} {folder}")


def chosen(state: State, name: str) -> Model:
    """The version of that name, or the latest. UnknownModel, UnknownVersion."""
    wanted = VersionedModel.parse(name)
    versions = {model.version: model for model in state.models if model.name == wanted.name}
    if not versions:
        raise UnknownModel.named(wanted.name, {model.name for model in state.models})
    version = wanted.version or state.latest.get(wanted.name) or max(versions)
    if version not in versions:
        raise UnknownVersion.named(name, [str(model.id) for model in versions.values()])
    return versions[version]


def placed(model: Model, state: State, folder: Path) -> Model:
    """The model with its file here."""
    name = Path(model.target).name
    if not model.sha256 or name not in state.files:
        return model
    (folder / name).write_bytes(state.files[name])
    return msgspec.structs.replace(model, target=str(folder / name))
