"""The exception tree of the contracts, and the facts in its fields."""

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from shared.errors import ConfigurationError, ContractError, FieldError, IntegrityError, LeadtimeError


@pytest.mark.parametrize("error", [ContractError, FieldError, IntegrityError, ConfigurationError])
def test_every_error_has_one_root(error):
    assert issubclass(error, LeadtimeError)


def test_field_and_integrity_errors_are_the_sender_s_to_mend_and_configuration_ours():
    assert issubclass(FieldError, ContractError)
    assert issubclass(IntegrityError, ContractError)
    assert not issubclass(ConfigurationError, ContractError)


def test_a_field_error_names_field_kind_and_range():
    error = FieldError("rows[3].input_tokens", "nan", "a finite number of tokens")
    assert (error.field, error.found, error.allowed) == ("rows[3].input_tokens", "nan", "a finite number of tokens")
    assert str(error) == "rows[3].input_tokens: found nan; allowed: a finite number of tokens"


def test_pydantic_reports_a_field_error_as_a_fault_of_the_field():
    class Model(BaseModel):
        pool: str

        @field_validator("pool")
        @classmethod
        def check(cls, pool: str) -> str:
            raise FieldError("pool", "text", "none")

    with pytest.raises(ValidationError, match="found text; allowed: none"):
        Model(pool="x")
