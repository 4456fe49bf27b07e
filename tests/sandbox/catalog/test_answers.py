"""Verifiers of the families that are judged by a final text: near misses and tampering."""

from decimal import Decimal

import pytest

from sandbox.catalog.base import Split
from sandbox.task import TaskSpec
from tests.sandbox.catalog.playing import family_of, judge, right_end_state

NUMBER_FAMILIES = ["excel_growth", "pdf_report", "weather_api"]
TEXT_FAMILIES = [*NUMBER_FAMILIES, "contract_search", "ticket_root_cause"]
JUNK = ["", " ", "nan", "NaN", "inf", "-inf", "1e5", "1e309", "0x10", "ten", "null", "{}", "0"]
LONG = "9" * 100_000


def cases(name: str) -> list[tuple[TaskSpec, str]]:
    """A few instances with their right answers."""
    family = family_of(name)
    keys: list[tuple[Split, str]] = [("train", "en"), ("heldout", "zh")]
    specs = [family.instance(seed, seed, *key) for seed in range(3) for key in keys]
    return [(spec, family.oracle(spec).final_text) for spec in specs]


def correctness(name: str, spec: TaskSpec, text: str) -> object:
    """With an untouched world."""
    return judge(family_of(name), spec, text, right_end_state(spec))["correctness"]


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_right_answers_pass_and_junk_fails(name: str):
    """Exactly the answer; spaces around it do not matter; everything else does."""
    for spec, answer in cases(name):
        assert correctness(name, spec, answer) == 1.0
        assert correctness(name, spec, f"\n {answer}  ") == 1.0
        wrong = [*JUNK, LONG, answer + " x", f"The answer is {answer}", answer * 2, answer[:-1]]
        wrong += [spec.instruction, f"{answer}\n{spec.instruction}", f"{answer} or 1.00"]
        for text in wrong:
            assert correctness(name, spec, text) == 0.0, (spec.name, text[:80])


@pytest.mark.parametrize("name", NUMBER_FAMILIES)
def test_a_number_that_is_off_by_one_digit_fails(name: str):
    """The last place, the sign, a factor of ten, too few and too many places."""
    for spec, answer in cases(name):
        head, _, number = answer.rpartition(" ")
        value = Decimal(number)
        step = Decimal(1).scaleb(value.as_tuple().exponent)  # type: ignore[arg-type]
        others = [value + step, value - step, -value, value * 10]
        texts = [f"{other.quantize(step):f}" for other in others if other != value]
        texts += [f"{value:f}0", f"{value:f}".rpartition(".")[0]]
        for text in texts:
            assert correctness(name, spec, f"{head} {text}".strip()) == 0.0, (spec.name, text)


def test_units_and_separators_that_mean_the_same_pass():
    """1,234.56 is 1234.56, 12.34% is 12.34, 12.3 °C is 12.3."""
    for spec, answer in cases("pdf_report"):
        assert correctness("pdf_report", spec, f"{Decimal(answer):,.2f}") == 1.0
    for name, unit in (("excel_growth", "%"), ("excel_growth", " ％"), ("weather_api", " °C")):
        for spec, answer in cases(name):
            assert correctness(name, spec, answer + unit) == 1.0


@pytest.mark.parametrize("name", ["excel_growth", "weather_api"])
def test_the_name_counts_as_much_as_the_number(name: str):
    """Another name with the right number, and the number alone, are wrong."""
    named = [(spec, answer) for spec, answer in cases(name) if spec.verifier.data["name"]]
    assert named
    for spec, answer in named:
        label, _, number = answer.rpartition(" ")
        for text in (number, f"x{label} {number}", f"{label[:-1]} {number}", f"{number} {label}"):
            assert correctness(name, spec, text) == 0.0


@pytest.mark.parametrize("name", ["contract_search", "excel_growth", "pdf_report"])
def test_a_changed_world_fails(name: str):
    """The right answer over a changed, missing or forged file."""
    for spec, answer in cases(name)[:2]:
        (key,) = right_end_state(spec)
        states: list[dict[str, object]] = [{}, {key: "0" * 64}, {key: None}, {key: True}]
        for state in [*states, {"correctness": 1.0}]:
            verdict = judge(family_of(name), spec, answer, state)
            assert verdict["correctness"] == 0.0
            assert "changed" in str(verdict["reasons"])


def test_contract_answers_are_a_set_of_clauses():
    """Order is free; a clause too many, one missing or a wrong sum is not."""
    for spec, answer in cases("contract_search"):
        lines = answer.split("\n")
        clauses = spec.verifier.data["clauses"]
        assert correctness("contract_search", spec, "; ".join(reversed(lines))) == 1.0
        pretty = "\n".join(f"{number}: {amount:,}" for number, amount in clauses.items())
        assert correctness("contract_search", spec, pretty) == 1.0
        other = next(n for n, _, _ in spec.environment.data["clauses"] if n not in clauses)
        number, amount = next(iter(clauses.items()))
        for text in (
            f"{answer}\n{other} 500",
            f"{answer}\n{number} {amount}",
            answer.replace(str(amount), str(amount + 1)),
            "\n".join(lines[1:]),
            "\n".join(f"{number} {amount}" for number, _, _ in spec.environment.data["clauses"]),
        ):
            assert correctness("contract_search", spec, text) == 0.0


def test_ticket_answers_need_version_and_component():
    """Each half alone, the ruled-out component and another version are wrong."""
    for spec, answer in cases("ticket_root_cause"):
        data = spec.verifier.data
        incident = spec.environment.data["incident"]
        versions = spec.environment.data["words"]["products"][incident["product"]]
        other = next(version for version in versions if version != data["version"])
        for text in (
            data["version"],
            data["component"],
            f"{data['version']} {incident['ruled_out']}",
            f"{other} {data['component']}",
            f"{data['component']} {data['version']}",
        ):
            assert correctness("ticket_root_cause", spec, text) == 0.0
        assert correctness("ticket_root_cause", spec, answer.replace(" ", "; ", 1)) == 1.0
