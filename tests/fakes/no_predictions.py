"""A ladder whose every step fails: the heuristic decides."""


class NoPredictions:
    async def predict(self, *_: object) -> None:
        return None
