"""Wrong arguments end in one line that names the value; right ones in any form work."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from broken import check_line
from byte_tokenizer import VOCAB_SIZE
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_mtp

TEXT = "prompt"
IDS = [ord(c) for c in TEXT]


@pytest.fixture(scope="module")
def loaded(random_dir):
    return mlx_mtp.load(random_dir)


PROMPT_FORMS = {
    "text": TEXT,
    "list": IDS,
    "tuple": tuple(IDS),
    "bytes": TEXT.encode(),
    "mlx int32": mx.array(IDS, mx.int32),
    "mlx uint32": mx.array(IDS, mx.uint32),
    "mlx int64": mx.array(IDS, mx.int64),
    "mlx uint8": mx.array(IDS, mx.uint8),
    "numpy int32": np.array(IDS, np.int32),
    "numpy uint32": np.array(IDS, np.uint32),
    "numpy int64": np.array(IDS, np.int64),
    "list of numpy integers": list(np.array(IDS)),
}


@pytest.mark.parametrize("form", PROMPT_FORMS)
def test_prompt_forms(loaded, form):
    prompt = PROMPT_FORMS[form]
    want = list(mlx_mtp.stream_generate(*loaded, IDS, max_tokens=12))
    got = list(mlx_mtp.stream_generate(*loaded, prompt, max_tokens=12))
    assert [r.token for r in got] == [r.token for r in want]
    assert {r.prompt_tokens for r in got} == {len(IDS)}
    if form != "text":
        steps = mlx_mtp.mtp_generate_step(prompt, loaded[0], max_tokens=12)
        assert [token for token, *_ in steps] == [r.token for r in want]


def test_the_callers_prompt_is_left_alone(loaded):
    prompt = list(IDS)
    list(mlx_mtp.stream_generate(*loaded, prompt, max_tokens=4))
    assert prompt == IDS


def test_tokenizer_of_transformers(loaded):
    model, tokenizer = loaded
    want = mlx_mtp.generate(model, tokenizer, TEXT, max_tokens=12)
    assert isinstance(tokenizer, TokenizerWrapper)
    assert mlx_mtp.generate(model, tokenizer._tokenizer, TEXT, max_tokens=12) == want


WRONG_PROMPTS = {
    "no text": ("", "empty"),
    "no ids": ([], "empty"),
    "no mlx ids": (mx.array([], mx.int32), "empty"),
    "id too large": ([1, VOCAB_SIZE], f"token id {VOCAB_SIZE} is outside"),
    "id negative": ([-1], "token id -1 is outside"),
    "id enormous": ([10**20], "token id 100000000000000000000 is outside"),
    "mlx id too large": (mx.array([5, 300]), "token id 300 is outside"),
    "numpy id negative": (np.array([-7]), "token id -7 is outside"),
    "two rows": ([[1, 2], [3, 4]], "one row of token ids"),
    "two mlx rows": (mx.array([[1, 2]]), "one row of token ids, not 2-D"),
    "two numpy rows": (np.array([[1, 2]]), "one row of token ids, not 2-D"),
    "a single mlx id": (mx.array(3), "one row of token ids, not 0-D"),
    "fractions": ([1.5], "1.5"),
    "mlx fractions": (mx.array([1.5]), "1.5"),
    "letters": (["a"], "'a'"),
}


@pytest.mark.parametrize("name", WRONG_PROMPTS)
@pytest.mark.parametrize("mtp", [True, False])
def test_wrong_prompt(loaded, name, mtp):
    prompt, word = WRONG_PROMPTS[name]
    with pytest.raises(ValueError) as refused:  # noqa: PT011, the words follow
        mlx_mtp.stream_generate(*loaded, prompt, mtp=mtp)
    check_line(str(refused.value), word)
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        mlx_mtp.mtp_generate_step(prompt, loaded[0])
    check_line(str(refused.value), word)


def test_steps_take_no_text(loaded):
    with pytest.raises(ValueError, match="'p'"):
        mlx_mtp.mtp_generate_step(TEXT, loaded[0])


WRONG_OPTIONS = [
    ({"num_draft_tokens": -1}, "num_draft_tokens must be 0 to 8 or 'auto', not -1"),
    ({"num_draft_tokens": 9}, "num_draft_tokens must be 0 to 8 or 'auto', not 9"),
    ({"num_draft_tokens": 2.5}, "num_draft_tokens must be 0 to 8 or 'auto', not 2.5"),
    ({"num_draft_tokens": "2"}, "num_draft_tokens must be 0 to 8 or 'auto', not '2'"),
    ({"max_tokens": -2}, "max_tokens must be -1 (no limit) or a whole number, not -2"),
    ({"prefill_step_size": 0}, "prefill_step_size must be 1 or more, not 0"),
]


@pytest.mark.parametrize(("options", "words"), WRONG_OPTIONS, ids=str)
def test_wrong_option(loaded, options, words):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        mlx_mtp.stream_generate(*loaded, TEXT, **options)
    check_line(str(refused.value), words)
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        mlx_mtp.mtp_generate_step(IDS, loaded[0], **options)
    check_line(str(refused.value), words)


def test_no_tokens(loaded):
    """As in mlx-lm: an error where text is asked for, nothing where steps are."""
    with pytest.raises(ValueError, match="max_tokens"):
        mlx_mtp.stream_generate(*loaded, TEXT, max_tokens=0)
    assert list(mlx_mtp.mtp_generate_step(IDS, loaded[0], max_tokens=0)) == []


def test_unknown_options_are_not_swallowed(loaded):
    with pytest.raises(TypeError, match="draft_model"):
        mlx_mtp.stream_generate(*loaded, TEXT, draft_model=loaded[0])
    with pytest.raises(TypeError, match="draft_model"):
        mlx_mtp.generate(*loaded, TEXT, draft_model=loaded[0])


def test_model_without_head(random_dir):
    model, tokenizer = mlx_mtp.load(random_dir, mtp=False)
    for call in (
        lambda: mlx_mtp.stream_generate(model, tokenizer, TEXT),
        lambda: mlx_mtp.stream_generate(model, tokenizer, TEXT, num_draft_tokens=0),
        lambda: mlx_mtp.generate(model, tokenizer, TEXT, mtp=True),
        lambda: mlx_mtp.mtp_generate_step(IDS, model),
    ):
        with pytest.raises(ValueError, match=r"no MTP head.*convert\.py") as refused:
            call()
        check_line(str(refused.value))
    assert mlx_mtp.generate(model, tokenizer, TEXT, mtp=False, max_tokens=3)


def test_model_of_another_family(loaded):
    model = nn.Linear(2, 2)
    for name in (None, "llama"):
        model.model_type = name
        with pytest.raises(ValueError, match="is not supported; supported are"):
            mlx_mtp.stream_generate(model, loaded[1], TEXT, mtp=False)
