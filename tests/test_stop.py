"""Stop strings over piece borders, and the union of end tokens."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.stop import StopStrings, check_stop, end_token_ids

letters = st.text("ab🙂", min_size=1, max_size=4)


@given(st.lists(letters, max_size=12), st.lists(letters, max_size=3))
def test_as_on_the_whole_text(pieces, stops):
    """The same cut as a search in the whole text, however it is cut into pieces."""
    text, shown, stopped = "".join(pieces), "", False
    matcher = StopStrings(stops)
    seen = ""
    for piece in pieces:
        seen += piece
        more, stopped = matcher.feed(piece)
        shown += more
        if stopped:
            break
    else:
        shown += matcher.flush()
    # The stream ends with the piece that completes a stop string.
    found = [at for s in stops if (at := seen.find(s)) >= 0]
    assert stopped == bool(found)
    assert shown == (seen[: min(found)] if found else text)


def test_nothing_is_held_back_without_need():
    matcher = StopStrings(["END"])
    assert matcher.feed("some E") == ("some ", False)
    assert matcher.feed("x") == ("Ex", False)
    assert matcher.feed("EN") == ("", False)
    assert matcher.feed("D and more") == ("", True)


@pytest.mark.parametrize("wrong", ["", [""], [3]])
def test_wrong_stop_strings(wrong):
    if wrong == "":
        assert check_stop(None) == []
        wrong = [wrong]
    with pytest.raises(ValueError, match="stop string"):
        check_stop(wrong)


def test_end_tokens_are_a_union(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": 1, "text_config": {"eos_token_id": [2, 3]}})
    )
    assert end_token_ids(tmp_path) == {1, 2, 3}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4]}))
    assert end_token_ids(tmp_path) == {1, 2, 3, 4}
