"""Hugging Face Transformers: classifiers of texts, from a pipeline or the folder that
save_pretrained() writes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clipper_container.adapters.folders import unpacked
from clipper_container.loading.errors import LoadError, first_line
from clipper_container.loading.files import tarred
from clipper_container.model import Model, Scored, UserValue
from clipper_container.schema import Array

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TASK = "text-classification"
_ARCHITECTURE = "ForSequenceClassification"
# of the texts that are evaluated together, padding included
TOKENS_MAX = 8192
_INSTEAD = "deploy a function that calls it, with input= and output="


class TextClassifier(Model):
    """Classifies texts as the pipeline `text-classification` does: the label with the largest
    score, and the score as its confidence. A model of one label is a regression: its output is a
    number of f32.

    The texts of a batch are sorted by their tokens and evaluated in parts of at most `TOKENS_MAX`
    tokens, each padded to its longest text.
    """

    input = "str"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._torch = torch
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._labels = [str(model.config.id2label[i]) for i in range(model.config.num_labels)]
        self._several = model.config.problem_type == "multi_label_classification"
        positions = getattr(model.config, "max_position_embeddings", None) or 1 << 30
        self._tokens_max = min(int(tokenizer.model_max_length), int(positions))
        self.output = "str" if len(self._labels) > 1 else "f32"

    def predict_batch(self, inputs: UserValue) -> UserValue:
        """Classify texts. Raises: ValueError for one with more tokens than the model takes."""
        texts = list(inputs)
        tokens = self._tokenizer(texts, truncation=False)
        lengths = [len(ids) for ids in tokens["input_ids"]]
        for row, length in enumerate(lengths):
            if length > self._tokens_max:
                raise ValueError(
                    f"text {row} has {length} tokens; the model takes at most {self._tokens_max}"
                )
        logits = np.empty((len(texts), len(self._labels)), np.float32)
        for rows in _parts(lengths):
            part = {name: [values[i] for i in rows] for name, values in tokens.items()}
            padded = self._tokenizer.pad(part, return_tensors="pt")
            with self._torch.inference_mode():
                logits[rows] = self._model(**padded).logits.float().numpy()
        return self._answered(logits)

    def _answered(self, logits: Array) -> UserValue:
        if len(self._labels) == 1:
            return logits[:, 0]
        scores = 1 / (1 + np.exp(-logits)) if self._several else _softmax(logits)
        best = scores.argmax(axis=1)
        return Scored([self._labels[i] for i in best], scores[np.arange(len(best)), best])


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: Array = powers / powers.sum(axis=1, keepdims=True)
    return found


def _parts(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the rows of each part, of similar lengths, of at most TOKENS_MAX with padding."""
    part: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if part and (len(part) + 1) * lengths[row] > TOKENS_MAX:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def bytes_of(pipeline: UserValue) -> bytes:
    """Return the folder of a pipeline as a tar. Raises: LoadError for one of another task, or with
    settings that the folder does not keep."""
    if pipeline.task != TASK:
        raise LoadError(
            f"a pipeline of the task {pipeline.task!r} has no adapter, {TASK!r} has one: {_INSTEAD}"
        )
    kept = (pipeline._preprocess_params, pipeline._forward_params, pipeline._postprocess_params)
    if settings := sorted({name for each in kept for name in each}):
        raise LoadError(
            f"this pipeline has the settings {', '.join(settings)}, which its folder does not keep:"
            f" {_INSTEAD}"
        )
    with tempfile.TemporaryDirectory(prefix="clipper-transformers-") as folder:
        pipeline.save_pretrained(folder)
        return tarred(Path(folder))


def load_file(kind: str, content: bytes, about: Mapping[str, UserValue]) -> TextClassifier:
    """Load the tar of a folder. Weights are read from safetensors only, and code that a folder
    brings along is not run. Raises: LoadError."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with unpacked(content, "transformers") as folder:
        _check(Path(folder))
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            model = AutoModelForSequenceClassification.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype="auto",
            )
        except ModuleNotFoundError:
            raise
        except Exception as error:
            raise LoadError(f"transformers cannot load this folder: {first_line(error)}") from error
        return TextClassifier(model, tokenizer)


def _check(folder: Path) -> None:
    """Raise LoadError for a folder of another task."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise LoadError(f"config.json of this folder cannot be read: {error}") from None
    names = [str(name) for name in config.get("architectures") or ()]
    if not any(name.endswith(_ARCHITECTURE) for name in names):
        raise LoadError(
            f"this folder holds {', '.join(names) or 'a model without architectures'}; models that"
            f" end in {_ARCHITECTURE} have an adapter: {_INSTEAD}"
        )
