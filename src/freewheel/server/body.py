"""What all bodies of requests have in common."""

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """JSON with known fields of the right types; anything else is refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)
