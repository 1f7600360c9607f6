"""Sentence Transformers: texts to vectors, from the folder that save_pretrained() writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clipper_container.adapters.folders import unpacked
from clipper_container.loading.errors import LoadError, first_line
from clipper_container.loading.files import tarred
from clipper_container.model import Model, UserValue

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class SentenceModel(Model):
    """Encodes texts as SentenceTransformer.encode() does: a vector of f32 for each.

    Texts of a batch are padded to the longest of those that are evaluated together, which are of
    similar length. A text longer than the model's limit of tokens is cut, as encode() cuts it.
    """

    input = "str"

    def __init__(self, model: SentenceTransformer) -> None:
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._model = model.eval()
        self.output = f"f32[{model.get_embedding_dimension()}]"

    def predict_batch(self, inputs: UserValue) -> UserValue:
        """Encode texts; (n, dimension) of f32."""
        return self._model.encode(
            list(inputs), convert_to_numpy=True, show_progress_bar=False
        ).astype("float32", copy=False)


def bytes_of(model: UserValue) -> bytes:
    """Return the folder of a model as a tar."""
    with tempfile.TemporaryDirectory(prefix="clipper-sentences-") as folder:
        model.save_pretrained(folder, create_model_card=False)
        return tarred(Path(folder))


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> SentenceModel:
    """Load the tar of a folder. Raises: LoadError."""
    from sentence_transformers import SentenceTransformer

    with unpacked(content, "sentences") as folder:
        try:
            model = SentenceTransformer(folder, device="cpu", local_files_only=True)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            raise LoadError(
                f"sentence-transformers cannot load this folder: {first_line(error)}"
            ) from error
        return SentenceModel(model)
