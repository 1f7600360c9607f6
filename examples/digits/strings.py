"""A text classifier: `str` inputs, labels as outputs.

Run: python examples/digits/strings.py [SLO_MS]
"""

import sys

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline

import clipper

SENTENCES = {
    "weather": [
        "rain in the morning",
        "a cold wind and snow",
        "sunny and warm",
        "clouds, then a storm",
    ],
    "sport": [
        "she scored in the last minute",
        "the team lost the match",
        "a new record in the race",
        "the coach resigned",
    ],
    "food": [
        "bake it for an hour",
        "add salt and butter",
        "a soup of beans",
        "the bread is fresh and warm",
    ],
}


def main(slo_ms: float = 100) -> None:
    texts = [text for group in SENTENCES.values() for text in group]
    labels = [label for label, group in SENTENCES.items() for _ in group]
    classifier = make_pipeline(TfidfVectorizer(), MultinomialNB()).fit(texts, labels)

    with clipper.start() as server:
        server.deploy(
            "topic", classifier, input="str"
        )  # predict gets a list of str, and returns one label for each
        app = server.app("topic", models=["topic"], slo_ms=slo_ms, default="unknown")
        for text in (
            "snow and a cold morning",
            "the team has a new coach",
            "fresh butter with salt",
        ):
            answer = app.predict(text).result()
            print(f"{text!r}: {answer.output} (confidence {answer.confidence:.2f})")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
