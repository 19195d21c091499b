"""predicted-latency-producer: which predictions decide, and against which objectives."""

import pytest

from services.router.request.inference_request import Slo
from services.router.scheduling.producers.predicted_latency import PredictedLatencyConfig, PredictedLatencyProducer
from tests.unit.router.scheduling.builders import candidates, context, prediction

WHOLE = prediction(ttft_p50=[1, 2], tpot_p50=[3, 4], e2e_p50=[50, 60], e2e_p90=[70, 80], in_range=[1, 0])


def produced(predicted=WHOLE, *, streamed=True, slo=None, **config):
    producer = PredictedLatencyProducer(PredictedLatencyConfig(**config))
    return producer.produce(context(candidates(2), predicted, streamed=streamed, slo=slo))


def columns(ctx):
    return {name: column.tolist() for name, column in ctx.prediction.columns.items()}


END_TO_END = {
    "ttft_p50": [50, 60],
    "ttft_p90": [70, 80],
    "e2e_p50": [50, 60],
    "e2e_p90": [70, 80],
    "in_range": [1, 0],
}


@pytest.mark.parametrize(
    ("mode", "streamed", "end_to_end"),
    [(True, False, False), (True, True, False), (False, True, True), (None, True, False), (None, False, True)],
)
def test_end_to_end_latency_stands_in_where_nothing_is_streamed(mode, streamed, end_to_end):
    ctx = produced(streaming_mode=mode, streamed=streamed)
    assert columns(ctx) == (END_TO_END if end_to_end else {n: c.tolist() for n, c in WHOLE.columns.items()})


def test_a_bundle_without_end_to_end_latency_is_used_as_it_is():
    ctx = produced(prediction(ttft_p50=[1, 2]), streaming_mode=False)
    assert columns(ctx) == {"ttft_p50": [1, 2]}


def test_the_buffer_scales_the_tpot_objective_alone():
    assert produced(slo_buffer_factor=0.9, slo=Slo(100, 50)).request.slo == Slo(100, 45)
    assert produced(slo_buffer_factor=0.9, slo=Slo(100)).request.slo == Slo(100)


def test_without_predict_the_model_is_not_asked_and_nothing_is_predicted():
    assert produced(predict=False).prediction is None
    assert not PredictedLatencyProducer(PredictedLatencyConfig(predict=False)).predicts
    assert PredictedLatencyProducer(PredictedLatencyConfig()).predicts
