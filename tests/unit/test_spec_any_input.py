"""Any JSON is answered with faults, never with a crash; what is taken once is taken again."""

import json
from typing import Any

from builders import make_body
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8rl_operator.spec import FP8RLJob, inspect, parse
from fp8rl_operator.spec.fields import fields_of, model_of
from fp8rl_operator.spec.job import JobSpec

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "1.0", "fp8", "a"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def paths(model: type = JobSpec, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, info in fields_of(model).items():
        below = model_of(info.annotation)
        found.append((*prefix, name))
        found += paths(below, (*prefix, name)) if below is not None else []
    return found


def put(body: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    place = body["spec"]
    for name in parents:
        below = place.setdefault(name, {})
        if not isinstance(below, dict):
            return
        place = below
    place[last] = value


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(paths()), JSON), min_size=1, max_size=4))
@example([(("samplers",), [None, {}, None])])  # a repair moves what the next fault speaks of
def test_any_value_in_any_field_is_taken_or_answered_with_faults_that_read(changes: list[tuple[tuple[str, ...], Any]]):
    body = make_body()
    for path, value in changes:
        put(body, path, value)
    job, faults = inspect(body)
    assert job is not None or faults
    for fault in faults:
        assert fault.reason
        assert "\n" not in str(fault)


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_any_body_is_answered(body: Any):
    job, faults = inspect(body)
    assert job is None
    assert faults


def test_a_job_written_out_is_the_same_job_read_again():
    job = parse(
        make_body(
            {"limits": {"mismatchKL": {"warn": "1e-7", "stop": "1e-6"}}, "trainer": {"optimizer": {"gradClip": 0.3}}}
        )
    )
    written = json.loads(job.model_dump_json(by_alias=True, exclude_none=True))
    assert isinstance(written["spec"]["trainer"]["optimizer"]["gradClip"], str)
    again = FP8RLJob.model_validate_json(json.dumps(written))
    assert again == job
