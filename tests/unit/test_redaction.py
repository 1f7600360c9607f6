"""Passwords and tokens that are in URLs or settings are shown nowhere."""

import random

import pytest

from clipper.config import Config, load
from clipper.errors import ClipperError
from clipper.settings.influx import InfluxSettings
from clipper.settings.redaction import shown
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.settings.tracing import ExportSettings, TracingSettings
from clipper.store import open_store
from clipper_container.redaction import without_secrets

SECRET = "S3CRET"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"redis://u:{SECRET}@h:1/0?prefix=x:", "redis://u:***@h:1/0?prefix=x:"),
        (f"redi://u:{SECRET}@h", "redi://u:***@h"),
        (f"redis://:{SECRET}@h", "redis://:***@h"),
        (f"redis://u:a/{SECRET}@h:1/0", "redis://u:***@h:1/0"),
        (f"redis://u:a@{SECRET}@h", "redis://u:***@h"),
        (f"https://{SECRET}@host/x", "https://***@host/x"),
        (f"unix:///x?password={SECRET}&db=1", "unix:///x?password=***&db=1"),
        (f"etcd://a:1,b:2/p?user=v&password={SECRET}", "etcd://a:1,b:2/p?user=v&password=***"),
        (f"https://h/k?X-Amz-Signature={SECRET}&x=1", "https://h/k?X-Amz-Signature=***&x=1"),
        (f"https://h/k?sig={SECRET}", "https://h/k?sig=***"),
        (f"https://h/k?access_token={SECRET}#f", "https://h/k?access_token=***#f"),
        (f"'redis://u:{SECRET}@h', \"x://v:{SECRET}@k\"", "'redis://u:***@h', \"x://v:***@k\""),
        ("http://h:80/a@b", "http://h:80/a@b"),
        ("http://[::1]:80/a@b?key=c.pem", "http://[::1]:80/a@b?key=c.pem"),
        ("mail a@b: see http://h/", "mail a@b: see http://h/"),
        ("/folder", "/folder"),
    ],
)
def test_a_text_without_the_secrets_of_its_urls(text: str, expected: str) -> None:
    assert without_secrets(text) == expected
    assert without_secrets(expected) == expected


def test_no_password_of_a_url_is_left_whatever_it_consists_of() -> None:
    rng = random.Random(1)
    marks = "aZ9:@%&=!$'()*+,;~._-[]\"\\{}|^`"
    for _ in range(2000):
        password = "".join(rng.choice(marks) for _ in range(rng.randrange(6))) + SECRET
        user = rng.choice(["", "ann", "a%40b"])
        url = f"redis://{user}:{password}@host:6379/0"
        text = f"store {url}: refused, as {url!r}"
        assert SECRET not in without_secrets(text), url


@pytest.mark.parametrize(
    "state",
    [
        f"redi://u:{SECRET}@h",
        f"redis://u:{SECRET}@h:port/0",
        f"unix:///nothing?password={SECRET}&x=",
        f"etcd://u:{SECRET}@h/x?nothing=1",
        f"etcd://?password={SECRET}",
    ],
)
def test_errors_of_stores_hide_passwords(state: str) -> None:
    with pytest.raises(ClipperError) as refused:
        open_store(state)
    assert SECRET not in f"{refused.value}{refused.value.hint}{refused.value!r}"


def test_settings_hide_their_secrets() -> None:
    url = f"redis://u:{SECRET}@h"
    settings = [
        StreamSettings(url=url),
        ModelStreamSettings(url=url),
        InfluxSettings(url=f"http://h/?token={SECRET}", token=SECRET),
        TracingSettings(endpoint=f"http://u:{SECRET}@h", headers=f"x={SECRET}"),
        ExportSettings(None, {"x": SECRET}, "", {}, "", 1.0, 1.0),
        load(None, env={}, state=url, http={"token": SECRET}, token=SECRET),
    ]
    for one in settings:
        assert SECRET not in repr(one)
        assert "***" in repr(one)
    assert shown("token", "") == ""
    assert repr(Config()).count("***") == 0
