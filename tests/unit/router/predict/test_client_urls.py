"""URLs of predictors: taken apart, or refused by name."""

import pytest

from services.router.predict.client import parse_urls
from shared.errors import FieldError


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://predictor:8080", "http://predictor:8080"),
        ("http://predictor:8080/", "http://predictor:8080"),
        ("http://predictor", "http://predictor:80"),
        ("https://predictor", "https://predictor:443"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_a_url_has_scheme_host_and_port(url, origin):
    assert [found.url for found in parse_urls([url])] == [origin]


@pytest.mark.parametrize(
    "url", ["predictor:8080", "ftp://predictor", "http://", "http://a:99999", "http://a/v1", "http://a?b"]
)
def test_what_cannot_be_a_predictors_url_is_refused(url):
    with pytest.raises(FieldError, match="predictors"):
        parse_urls([url])
