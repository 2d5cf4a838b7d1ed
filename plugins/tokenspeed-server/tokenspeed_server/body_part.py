"""The base of the objects in request bodies."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class BodyPart(BaseModel):
    """An object in the body of a request."""

    # Extra fields are kept, so that `tokenspeed_server.unknown_fields` can name them.
    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
