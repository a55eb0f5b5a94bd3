"""What /metrics says of halves of decode batches: nothing before it is known."""

from prometheus_client.parser import text_string_to_metric_families

from greenroom.engine.dbo import DboChoice
from greenroom.server.metrics import ServerMetrics
from tests.reference.scripted_engine import ScriptedEngine


def samples(choices: list[DboChoice]) -> dict[tuple[str, ...], float]:
    text = ServerMetrics(ScriptedEngine(), dbo=lambda: choices).text().decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("greenroom_dbo")
    }


def test_choices_and_what_they_were_made_by():
    measured = DboChoice(8, False, "measured", whole_ms=10.0, halves_ms=12.5)
    assert samples([measured, DboChoice(16, True, "as asked for"), DboChoice(32, None, "being measured")]) == {
        ("greenroom_dbo_halves", "8"): 0,
        ("greenroom_dbo_halves", "16"): 1,
        ("greenroom_dbo_step_seconds", "8", "whole"): 0.01,
        ("greenroom_dbo_step_seconds", "8", "halves"): 0.0125,
    }
    assert samples([]) == {}
