"""What pydantic finds wrong is told in our words: field, kind, range; and nothing of a text."""

from typing import Annotated

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.errors import kind_of, reason_of
from shared.faults import in_words, of_message


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    port: int = Field(default=0, ge=0, le=65_535)
    name: str = Field(default="a", max_length=4)


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    servers: tuple[Inner, ...]
    only: Inner | None = None

    @model_validator(mode="after")
    def check(self):
        if len(self.servers) > 2:
            raise ValueError("servers: found 3 or more; allowed: 2")
        return self


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("{", ("body", "not JSON: EOF while parsing an object at line 1 column 1")),
        ("[]", ("body", "found a list; allowed: an object")),
        ("{}", ("servers", "found nothing; allowed: a value")),
        (
            '{"servers": [{"port": 70000}]}',
            ("servers.0.port", "found 70000; allowed: less than or equal to 65535"),
        ),
        (
            '{"servers": [{"port": "secret"}]}',
            ("servers.0.port", "found text; allowed: a valid integer"),
        ),
        (
            '{"servers": [{"name": "secret"}]}',
            ("servers.0.name", "found text; allowed: text that should have at most 4 characters"),
        ),
        ('{"servers": [{"prot": "secret"}]}', ("servers.0.prot", "no such key; allowed: name, port")),
        ('{"servers": [], "only": {"prot": 1}}', ("only.prot", "no such key; allowed: name, port")),
        ('{"servers": [], "any": {"secret": 1}}', ("any", "no such key; allowed: only, servers")),
        ('{"servers": [{}, {}, {}]}', ("body", "servers: found 3 or more; allowed: 2")),
    ],
)
def test_a_fault_names_the_field_what_was_found_and_what_is_allowed(document, told):
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate_json(document)
    (fault,) = in_words(caught.value.errors(), Outer)
    assert fault == told
    assert "secret" not in str(fault)


def test_without_the_model_an_unknown_key_is_still_named():
    with pytest.raises(ValidationError) as caught:
        Inner.model_validate({"prot": 1})
    assert in_words(caught.value.errors()) == [("prot", "no such key")]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "nothing"), (True, "a boolean"), (1, "an integer"), (1.5, "a number"), ("x", "text"), ([], "a list"),
     ({}, "an object"), (b"", "bytes"), (object(), "a value of another kind")],
)  # fmt: skip
def test_a_kind_is_told_in_a_word(value, kind):
    assert kind_of(value) == kind


def test_what_the_system_says_is_told_in_its_words(tmp_path):
    with pytest.raises(OSError, match="nowhere") as missing:
        (tmp_path / "nowhere").read_bytes()
    assert reason_of(missing.value) == "No such file or directory"
    with pytest.raises(UnicodeDecodeError) as broken:
        b"ab\xff".decode()
    assert reason_of(broken.value) == "not text in UTF-8 from byte 2 on"
    assert reason_of(TimeoutError()) == "TimeoutError"
    assert reason_of(OSError(-2, "Name or service not known")) == "Name or service not known"


class Row(msgspec.Struct, forbid_unknown_fields=True):
    pool: str
    rows: list[list[float]] = []
    port: Annotated[int, msgspec.Meta(ge=0, le=9)] | None = None


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("{}", "row.pool: found nothing; allowed: a value"),
        ('{"pool": 5}', "row.pool: found an integer; allowed: text"),
        ('{"pool": "a", "rows": [["secret"]]}', "row.rows[0][0]: found text; allowed: a number"),
        ('{"pool": "a", "port": "secret"}', "row.port: found text; allowed: an integer or nothing"),
        ('{"pool": "a", "port": 10}', "row.port: found a value out of range; allowed: int <= 9"),
        ('{"pool": "a", "prot": 1}', "row.prot: found no key that is known; allowed: pool, rows, port"),
        ("[]", "row: found a list; allowed: an object"),
    ],
)
def test_a_fault_of_a_message_is_told_alike(document, told):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(document, type=Row)
    assert str(of_message(caught.value, "row", Row.__struct_fields__)) == told
