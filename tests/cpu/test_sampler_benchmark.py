"""`python -m benchmarks sampler` in its tiny form."""

import json

import pytest
import torch
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks
from benchmarks.sampler.cases import KINDS, make_columns, make_inputs, make_logits
from benchmarks.sampler.measure import Measurement, measure

pytestmark = pytest.mark.cpu

NAMES = (
    *("greedy", "temperature", "top_p_peaked", "top_p_flat"),
    *("top_k_top_p", "full", "mixed"),
)
END = ("", "_p90")


def test_a_cell_has_one_metric_for_each_figure(tmp_path):
    path = tmp_path / "figures.json"
    threads = torch.get_num_threads()

    command = ["sampler", "--smoke", "--threads", "1", "--json", str(path)]
    result = CliRunner().invoke(benchmarks, command, catch_exceptions=False)

    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    assert "3 rows x 700 tokens" in result.output
    document = json.loads(path.read_text())
    cells = ("1x700", "3x700")
    assert document["metrics"].keys() == {
        *(f"{name}_over_argmax_{cell}{end}" for name in NAMES for cell in cells for end in END),
        *(f"{name}_us_{cell}" for name in (*NAMES, "argmax", "floor") for cell in cells),
        *("read_gb_per_s", "threads", "rounds"),
    }
    assert all(value > 0 for value in document["metrics"].values())
    assert document["metrics"]["threads"] == 1


def test_ratios_are_of_neighbours():
    measured = Measurement(sample_us=[10.0, 30.0], argmax_us=[5.0, 10.0])

    assert measured.ratios == [2.0, 3.0]


def test_every_round_is_measured_and_the_logits_stay():
    logits = make_logits(6, 700, peaked=True)
    before = logits.clone()

    for kind in KINDS:
        measured = measure(kind, logits, num_rounds=3, warm_up=0)
        assert len(measured.sample_us) == len(measured.argmax_us) == 3

    assert logits.equal(before)


def test_rows_with_penalties_have_history():
    columns = make_columns(KINDS[-1], 12)
    history = make_inputs(columns, 700).history

    assert history.rows.tolist() == [4, 9]
    assert len(history.token_ids) == 2000
    assert int(history.token_ids.max()) < 700
    assert columns.temperature[0] == 0


def test_peaked_logits_have_their_mass_in_few_tokens():
    peaked = make_logits(3, 32_000, peaked=True).softmax(-1).topk(16).values.sum(-1)
    flat = make_logits(3, 32_000, peaked=False).softmax(-1).topk(16).values.sum(-1)

    assert (peaked > 0.9).all()
    assert (flat < 0.1).all()
