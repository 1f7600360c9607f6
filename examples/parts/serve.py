"""A text generator whose words arrive one by one: a Markov chain over pairs of words.

Run: python examples/parts/serve.py [FIRST WORDS]
"""

import random
import sys
from collections import defaultdict
from collections.abc import Iterator

import clipper

TEXT = """
the server sends a query to the model and the model sends a word and then the next word and the
reader of the words may stop the model when the words are enough and the server tells the model that
the reader has gone so the model stops and the next query begins with the first word again and a
query that has a deadline gets the words that have come until then and the reason why there are no
more of them
"""
WORDS_MAX = 40


def write(prompt: str) -> Iterator[str]:
    """Yield words that may follow the prompt, at most WORDS_MAX."""
    words, followers = TEXT.split(), defaultdict(list)
    for first, second, third in zip(words, words[1:], words[2:], strict=False):
        followers[first, second].append(third)
    last = tuple(prompt.split()[-2:])
    for _ in range(WORDS_MAX):
        if last not in followers:
            return
        word = random.choice(followers[last])
        yield word + " "
        last = last[1], word


if __name__ == "__main__":
    with clipper.start() as server:
        server.deploy("writer", write, input="str", output="str", row_by_row=True, cache=False)
        app = server.app("story", models=["writer"], slo_ms=5000, default="")
        prompt = " ".join(sys.argv[1:]) or "the server"
        for part in app.predict(prompt, stream=True, slo_total_ms=10_000):
            if part.is_last:
                print(f"\n{part.index} words in {part.latency_us / 1000:.1f} ms")
            else:
                print(part.output, end="", flush=True)
