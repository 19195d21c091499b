"""`predicted-latency-producer`: which of the model's predictions a profile decides by.

`streaming_mode` false, the published default: one latency, end to end, stands in for TTFT, and TPOT has no say, for
traffic that mixes streamed and whole answers. True: TTFT and TPOT. null: by request, since it says whether it streams.
Where the bundle doesn't predict what is asked for, the prediction is left as it is.

`slo_buffer_factor` scales the TPOT objective: below 1 leaves a margin. `predict: false` asks for no prediction at all:
samples are still made, and the profile's fallback decides.

Candidates that lie outside what the model has learnt keep their prediction; a NaN (unpredicted) is left for each plugin
to judge.
"""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from services.router.scheduling.config import StrictConfig
from services.router.scheduling.interfaces import Context


class PredictedLatencyConfig(StrictConfig):
    """What is asked of the model, and what its answers mean."""

    predict: bool = True
    """Whether the model is asked; false: the fallback decides, and the samples go on teaching."""
    streaming_mode: bool | None = None
    """true: TTFT and TPOT decide; false: end-to-end latency alone; null: by what each request asks for."""
    slo_buffer_factor: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Factor of the TPOT objective."""


class PredictedLatencyProducer:
    """Turns what the model said into what the profile decides by."""

    __slots__ = ("_config",)

    def __init__(self, config: PredictedLatencyConfig) -> None:
        self._config = config

    @property
    def predicts(self) -> bool:
        return self._config.predict

    def produce(self, context: Context) -> Context:
        config = self._config
        prediction, request = context.prediction, context.request
        if prediction is not None and not config.predict:
            prediction = None
        streaming = request.streamed if config.streaming_mode is None else config.streaming_mode
        if prediction is not None and not streaming and prediction.get("e2e_p50") is not None:
            columns = {f"ttft{name[3:]}": column for name, column in prediction.columns.items() if name[:4] == "e2e_"}
            columns |= {
                name: column for name, column in prediction.columns.items() if name[:5] not in {"ttft_", "tpot_"}
            }
            prediction = replace(prediction, columns=columns)
        if config.slo_buffer_factor != 1.0 and request.slo.tpot_ms is not None:
            slo = replace(request.slo, tpot_ms=request.slo.tpot_ms * config.slo_buffer_factor)
            request = replace(request, slo=slo)
        if prediction is context.prediction and request is context.request:
            return context
        return replace(context, prediction=prediction, request=request)
