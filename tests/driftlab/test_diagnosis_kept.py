"""A diagnosis in a notebook, and as the files that it is sent on as."""

import json

import pytest
import torch
from torch import nn

from driftlab import Verdict, diagnose

STEPS = 3


class Halves(nn.Module):
    """A linear layer as the sum of two; ``scale`` of the second should be 1."""

    def __init__(self, linear, scale):
        super().__init__()
        left, right = linear.weight.detach().split(3, 1)
        self.left, self.right = nn.Parameter(left.clone()), nn.Parameter(right.clone())
        self.bias, self.scale = nn.Parameter(linear.bias.detach().clone()), scale

    def forward(self, x):
        return x[:, :3] @ self.left.T + self.scale * (x[:, 3:] @ self.right.T) + self.bias


@pytest.fixture(scope="module", params=[1.0, 1.01], ids=["right", "wrong"])
def found(request):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(8, 6), torch.randint(3, (8,))

    def rewrite(model):
        model[0] = Halves(model[0], request.param)
        return model

    return diagnose(network, rewrite, [batch], steps=STEPS)


def test_its_curves_are_those_of_the_arms(found):
    if found.verdict is Verdict.BUG:  # settled without any training
        assert list(found.curves) == []
        return
    assert [row["step"] for row in found.curves] == list(range(STEPS + 1))
    losses = [row["loss/candidate.float32"] for row in found.curves]
    assert losses == pytest.approx([row["loss/reference.float32"] for row in found.curves], rel=1e-5)
    assert 0 < found.curves[-1]["weight_distance/candidate.float64"] < 1e-13


def test_as_json_it_has_what_was_found(found, tmp_path):
    read = json.loads(found.to_json(tmp_path / "diagnosis.json").read_text())
    assert (read["verdict"], read["headline"]) == (found.verdict, found.headline)
    assert read["where"] == (found.where.as_dict() if found.where else None)
    assert [e["probe"] for e in read["evidence"]] == [e.probe for e in found.evidence]
    assert len(read["curves"]) == len(found.curves)


def test_as_html_it_is_one_page_with_the_verdict_and_the_curves(found, tmp_path):
    page = found.to_html(tmp_path / "diagnosis.html").read_text()
    assert f'data-verdict="{found.verdict}"' in page
    assert ("Training loss" in page) == bool(found.curves)
    assert "<h2>Settings</h2>" not in page
    assert "To repeat it" not in page  # a call has no command


def test_in_a_notebook_it_reads_as_on_a_terminal(found):
    cell = found._repr_html_()
    assert cell.startswith("<pre>")
    words = {e.probe for e in found.evidence} | {f"{found.verdict}: "}
    assert all(word in cell and word in str(found) for word in words)
