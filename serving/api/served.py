"""The models that a gateway answers for: the target under its own name, and under its profile's."""

from dataclasses import dataclass

from serving.api.backend import Backend
from serving.api.errors import ApiError, Failure
from serving.api.responses import ModelCard, ModelList


@dataclass(frozen=True)
class ServedModels:
    """Names are the target's, then the profile's."""

    names: tuple[str, ...]
    created: int

    @classmethod
    def of(cls, backend: Backend, *, created: int) -> "ServedModels":
        return cls(tuple(dict.fromkeys((backend.tokenizer.name, backend.profile.name))), created)

    @property
    def cards(self) -> ModelList:
        return ModelList(data=[ModelCard(id=name, created=self.created) for name in self.names])

    def card(self, name: str) -> ModelCard:
        """The model called `name`. Raises a 404 that lists the names there are."""
        if name not in self.names:
            known = " or ".join(repr(known) for known in self.names)
            message = f"model: {name[:80]!a} is not served here; use {known}"
            raise ApiError(Failure(404, message, param="model", code="model_not_found"))
        return ModelCard(id=name, created=self.created)
