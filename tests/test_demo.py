"""The demo checkpoint in the package: the README's first command."""

import json

import pytest

import mlx_mtp
from mlx_mtp.generate_cli import main
from mlx_mtp.load import DEMO_PATH

PROMPT = "def "


@pytest.fixture(scope="module")
def demo():
    return mlx_mtp.load(DEMO_PATH)


def test_text_and_acceptance(demo):
    plain = mlx_mtp.generate(*demo, PROMPT, mtp=False)
    responses = list(mlx_mtp.stream_generate(*demo, PROMPT, num_draft_tokens=1))
    assert "".join(response.text for response in responses) == plain
    assert len(plain) > 100
    assert responses[-1].stats.acceptance_rate > 0.7


@pytest.mark.parametrize("k", [2, 4, 8])
def test_text_with_more_drafts(demo, k):
    plain = mlx_mtp.generate(*demo, PROMPT, mtp=False)
    assert mlx_mtp.generate(*demo, PROMPT, num_draft_tokens=k) == plain


def test_it_is_the_commands_default_model(demo, capsys):
    main(["--mtp", "--num-draft-tokens", "1", "--prompt", PROMPT, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["mtp"]
    assert document["acceptance_rate"] > 0.7
