"""Terminal plots from block characters and rich's text, 80 columns wide."""

from collections.abc import Sequence

from rich.text import Text

from clipper_demo.online_learning import Story

BLOCKS = " ▁▂▃▄▅▆▇█"
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
TITLES = {"exp3": "exp3 picks a model", "stacking": "stacking weighs all"}
SCALES = (0.25, 0.5, 1.0)
MARKS = "d wrong labels   m right again   k killed   s frozen"
WIDTH = 26  # columns of each application's history
WINDOW_S = 26.0  # one column per second
_NAME = 8
_PERCENT = 6


def column_heights(values: Sequence[float], rows: int) -> list[list[str]]:
    """Draw values from 0 to 1 as columns of `rows` characters, top row first. A value above 0 is
    always visible.
    """
    drawn = []
    for value in values:
        eighths = round(min(max(value, 0.0), 1.0) * rows * 8)
        eighths = max(eighths, 1) if value > 0 else eighths
        drawn.append(
            [BLOCKS[min(max(eighths - 8 * (rows - 1 - row), 0), 8)] for row in range(rows)]
        )
    return drawn


def history(
    story: Story, application: str, model: str, now_s: float, width: int = WIDTH
) -> list[float]:
    """Return the model's share at `width` times of the last WINDOW_S; 0 before the first sample."""
    step = WINDOW_S / width
    values, at = [], 0
    samples = story.samples
    for column in range(width):
        moment = now_s - WINDOW_S + (column + 1) * step
        while at + 1 < len(samples) and samples[at + 1].at_s <= moment:
            at += 1
        there = samples and samples[at].at_s <= moment
        values.append(samples[at].shares[application].get(model, 0.0) if there else 0.0)
    return values


def marks(story: Story, now_s: float, width: int = WIDTH) -> str:
    """Return a line with each event's mark in its column."""
    line = [" "] * width
    for event in story.events:
        column = width - 1 - int((now_s - event.at_s) / (WINDOW_S / width))
        if 0 <= column < width:
            line[column] = event.mark
    return "".join(line)


def shares_plot(story: Story, now_s: float, rows: int = 2) -> Text:
    """Draw each model's share over the last WINDOW_S, applications side by side; `rows` lines
    per model.
    """
    text = Text(no_wrap=True)
    past = {
        (app, model): history(story, app, model, now_s)
        for app in story.applications
        for model in story.models
    }
    scales = {
        app: _scale([past[app, model] for model in story.models]) for app in story.applications
    }
    titles = [
        f"{TITLES.get(app, app):<{WIDTH - 6}}{f'to {scales[app]:.0%}':>6}{'':<{_PERCENT}}"
        for app in story.applications
    ]
    text.append(f"{' ' * _NAME} {'   '.join(titles)}\n", "bold")
    for number, model in enumerate(story.models):
        colour = COLOURS[number % len(COLOURS)]
        drawn = [
            column_heights([v / scales[app] for v in past[app, model]], rows)
            for app in story.applications
        ]
        for row in range(rows):
            last = row == rows - 1
            text.append(f" {model if last else '':<{_NAME}}"[:_NAME] + " ", colour if last else "")
            for at, app in enumerate(story.applications):
                text.append("".join(column[row] for column in drawn[at]), colour)
                share = story.samples[-1].shares[app].get(model, 0.0) if story.samples else 0.0
                text.append(
                    f"{share:>{_PERCENT}.0%}" if last else " " * _PERCENT,
                    "bold" if share >= 0.5 else "dim",
                )
                text.append("   " if at + 1 < len(story.applications) else "\n")
    return text.append_text(_axis(story, now_s))


def _scale(histories: list[list[float]]) -> float:
    """Return the share that a full column stands for: the smallest of SCALES that fits."""
    largest = max((max(values) for values in histories), default=0.0)
    return next((scale for scale in SCALES if largest <= scale), 1.0)


def _axis(story: Story, now_s: float) -> Text:
    """Draw the time axis, the events, and each application's error rate."""
    text = Text(no_wrap=True)
    ends = f"{-WINDOW_S:.0f} s", "now"
    ruler = f"{ends[0]}{'·' * (WIDTH - len(ends[0]) - len(ends[1]))}{ends[1]}"
    happened = marks(story, now_s)
    wide = " " * (_PERCENT + 3)
    text.append(f"{' ' * _NAME} {wide.join([ruler] * len(story.applications))}\n", "dim")
    text.append(f"{' ' * _NAME} {wide.join([happened] * len(story.applications))}\n", "bold red")
    errors = [
        f"wrong: {story.recent_error(app):.1%} lately, {story.whole_error(app):.1%} in all"
        for app in story.applications
    ]
    text.append(
        f"{' ' * _NAME} {'   '.join(f'{error:<{WIDTH + _PERCENT}}' for error in errors)}".rstrip()
    )
    return text.append(f"\n{' ' * _NAME} {MARKS if story.events else ''}".rstrip(" "), "dim")


def line(story: Story) -> str:
    """Return the same as one line for a log: the two largest shares of each application, and its
    errors.
    """
    parts = []
    for app in story.applications:
        shares = story.samples[-1].shares[app] if story.samples else {}
        largest = sorted(shares, key=lambda model: -shares[model])[:2]
        first = ", ".join(f"{model} {shares[model]:.0%}" for model in largest)
        parts.append(f"{app}: {first}; {story.recent_error(app):.1%} wrong")
    return "  |  ".join(parts)
