"""The reference page of the job."""

import re

from fp8rl_operator import docs
from fp8rl_operator.names import CONDITIONS
from fp8rl_operator.plan_revisions import IN_PLACE
from fp8rl_operator.spec.checks import CHECKS, TRANSITIONS
from fp8rl_operator.spec.fields import fields_of, model_of
from fp8rl_operator.spec.job import JobSpec
from fp8rl_operator.spec.status import JobStatus

PAGE = docs.PATH.read_text()


def rows(section: str) -> list[str]:
    body = re.split(rf"^#+ {re.escape(section)}$", PAGE, flags=re.MULTILINE)[1]
    return [line for line in re.split(r"^#", body, flags=re.MULTILINE)[0].splitlines() if line.startswith("| `")]


def test_the_page_on_disk_is_the_one_that_the_models_give():
    assert docs.render() == PAGE


def test_every_field_has_its_line():
    def check(model, path):
        lines = rows(path)
        assert [line.split("`")[1] for line in lines] == list(fields_of(model)), path
        for name, info in fields_of(model).items():
            below = model_of(info.annotation)
            if below is not None:
                check(below, f"{path}.{name}{'[]' if 'tuple' in str(info.annotation) else ''}")

    check(JobSpec, "spec")
    check(JobStatus, "status")


def test_a_line_says_type_default_range_and_meaning():
    line = next(line for line in rows("spec.rollout") if "`temperature`" in line)
    assert line == (
        "| `temperature` | decimal | `1.0` | > 0 and ≤ 10 | Sampling temperature; log-probabilities are taken at the same. |"
    )


def test_every_rule_and_every_condition_has_its_line():
    for check in CHECKS:
        assert f"| {check.name.replace('_', ' ')} |" in PAGE
    for condition in CONDITIONS:
        assert f"| {condition} |" in PAGE


def test_tables_have_the_same_number_of_cells_in_every_line():
    width = 0
    for line in PAGE.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (cells and width) or cells == width, line
        width = cells


def test_what_is_immutable_and_what_changes_in_place_are_told():
    for rule in TRANSITIONS:
        assert f"| {rule.message} |" in PAGE
    for field in IN_PLACE - {"managedBy"}:
        assert f"`{field}`" in PAGE
