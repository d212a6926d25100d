"""``mlx_mtp.chat``: turns that reuse the cache, and Ctrl-C wherever it comes."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from broken import check_line, copy_of, drop_head
from chat_session import INTERRUPT, Session
from checkpoints import END, chain
from checks import wrong_at
from test_prompt_cache import count_positions

from mlx_mtp.chat import HELP, main

ROOT = Path(__file__).parent.parent
ANSWER = "aé🙂bcdfgh"


@pytest.fixture(scope="module")
def path(make_model_dir) -> Path:
    """Answers every message with ANSWER; a third of the drafts is wrong."""
    succ = chain([ord("\n"), *ANSWER.encode(), END])
    draft_succ = wrong_at(succ, range(0, len(succ), 3))
    return make_model_dir("chat", kind="noisy", succ=succ, draft_succ=draft_succ)


@pytest.fixture
def session(monkeypatch, capsys, path):
    return Session(monkeypatch, capsys, path)


@pytest.mark.parametrize("options", [(), ("--no-mtp",), ("--num-draft-tokens", "4")])
def test_turns_are_the_templates(session, options):
    system = ("--system-prompt", "Be brief.")
    out = session.run("one", "two!", "three", "q", options=[*options, *system])
    assert out.count(ANSWER) == 3
    contents = []
    for turn, question in enumerate(("one", "two!", "three")):
        contents.append(question)
        ids = session.rendered(*contents, system="Be brief.")
        session.check_cold(turn, ids)
        assert bool(session.cached[turn]) == (turn > 0)
        contents.append(ANSWER)


def test_a_turn_computes_its_new_tokens(session, monkeypatch):
    counted = count_positions(None, monkeypatch)
    marks = []
    session.hook = lambda turn, count: marks.append(sum(counted))
    out = session.run("a long question " * 9, "more", "s", "q", options=["-m", "1"])
    before = len(session.rendered("a long question " * 9)) + 1
    new = len(session.rendered("a long question " * 9, "a", "more")) - before
    # The hook is called before a turn, and with its only response, which by then is
    # in the cache as well.
    assert marks[4] - marks[3] == new + 1
    assert f"Cache: {before} tokens before the turn, {before} reused, {new} " in out


def test_figures(session):
    out = session.run("s", "one", "two", "s", "q", options=["--num-draft-tokens", "1"])
    lines = out.splitlines()
    assert lines[2] == "no turn yet"
    stats = session.answers[1][-1].stats
    assert lines[-2].startswith(
        f"MTP: K = 1, {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts"
    )
    cached, new = len(session.cached[1]), len(session.fed[1])
    assert lines[-1].startswith(f"Cache: {cached} tokens before the turn, {cached} ")
    assert f"reused, {new} computed" in lines[-1]


def test_no_mtp(session):
    out = session.run("one", "s", "q", options=["--no-mtp"])
    assert "no MTP\n" in out
    assert "]\nMTP: off\nCache: 0 tokens" in out


def test_model_without_head(session, tmp_path):
    session.path = copy_of(session.path, tmp_path / "headless")
    drop_head(session.path)
    assert ANSWER in session.run("one", "q")


def test_reset_and_help(session):
    out = session.run("one", "r", "s", "h", "", "one", "q")
    assert session.cached == [[], []]
    assert session.fed[0] == session.fed[1]
    assert "[reset]\nno turn yet\n" in out
    assert out.count(HELP) == 2


@pytest.mark.parametrize("end", [[], [INTERRUPT], ["q"]])
def test_ways_to_leave(session, end):
    assert ANSWER in session.run("one", *end)
    assert len(session.answers) == 1


def test_template_that_rewrites_earlier_turns(session, tmp_path):
    """As those that drop thinking: the turn begins where the last answer began."""
    session.path = copy_of(session.path, tmp_path / "rewrites")
    template = session.path / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    opened = session.rendered("one")
    lasting = opened[: -len([*b"assistant\n\n"]) - 2]  # <|im_start|> … <think>
    out = session.run("one", "two", "three", "s", "q")
    assert session.cached[0] == lasting
    session.check_cold(0, opened)
    for turn, said in ((1, ["one", ANSWER, "two"]),):
        session.check_cold(turn, session.rendered(*said))
        assert session.cached[turn][: len(lasting)] == lasting
    third = session.rendered("one", ANSWER, "two", session.text(1), "three")
    session.check_cold(2, third)
    held = len(session.rendered("one", ANSWER, "two")) + len(session.answers[1])
    reused = len(session.rendered("one", ANSWER, "two")) - (len(opened) - len(lasting))
    assert f"Cache: {held} tokens before the turn, {reused} reused" in out


def test_template_that_rewrites_everything(session, tmp_path):
    """Nothing can be used again: the turn starts from nothing, without a word."""
    session.path = copy_of(session.path, tmp_path / "rewrites all")
    template = session.path / "chat_template.jinja"
    template.write_text(
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    out = session.run("one", "two", "s", "q")
    session.check_cold(1, session.rendered("one", ANSWER, "two"))
    assert "tokens before the turn, 0 reused" in out


def test_without_template(session):
    """The text as it is, behind everything so far."""
    session.run("one", "two", "q", options=["--ignore-chat-template", "-m", "5"])
    first = [r.token for r in session.answers[0]]
    assert session.cached[1] == [*b"one", *first]
    session.check_cold(1, [*b"one", *first, *b"two"])


def raise_at(turn, count):
    def hook(at, now):
        if (at, now) == (turn, count):
            raise KeyboardInterrupt

    return hook


def press_at(turn, count, times=1):
    def hook(at, now):
        if (at, now) == (turn, count):
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return hook


# Before the first response; behind so many; while a response is on its way.
MOMENTS = [None, 1, 2, 3, 5, 7, 9, 14, -1, -4, -14]


@pytest.mark.parametrize("hook", [raise_at, press_at])
@pytest.mark.parametrize("count", MOMENTS)
def test_ctrl_c_in_an_answer(session, hook, count):
    """The answer stands as it was shown, and the next turn is a cold run's."""
    session.hook = hook(1, count)
    out = session.run("one", "two", "three", "q", options=["--num-draft-tokens", "3"])
    shown = session.text(1)
    late = hook is press_at and count == 14  # the answer has ended
    assert f"{shown}\n[{'14 tokens' if late else 'interrupted'}" in out
    session.check_cold(2, session.rendered("one", ANSWER, "two", shown, "three"))
    assert session.text(2) == ANSWER
    tokens = [r.token for r in session.answers[1]]
    if count is None:
        assert session.cached[2] == session.cached[1]
    elif hook is raise_at and count < 0:  # a token in the cache that was not shown
        assert session.cached[2] == []
    elif list(shown.encode()) == [token for token in tokens if token != END]:
        assert session.cached[2] == session.cached[1] + session.fed[1] + tokens
    else:  # a part of a character was not shown
        assert session.cached[2] == []


@pytest.mark.parametrize("done", [0, 4, 8, "end"])
def test_ctrl_c_in_the_prefill(session, done):
    def progress(turn, now):
        if turn == 1 and now == (len(session.fed[1]) if done == "end" else done):
            signal.raise_signal(signal.SIGINT)

    session.progress = progress
    question = "a question that takes a while"
    options = ["--prefill-step-size", "4"]
    out = session.run("one", question, "s", "three", "q", options=options)
    assert "[interrupted]" in out
    computed = len(session.fed[1]) if done == "end" else done
    assert f"MTP: no drafts\nCache: {len(session.cached[1])} tokens before" in out
    assert f" reused, {computed} computed\n" in out
    assert session.answers[1] == []
    session.check_cold(2, session.rendered("one", ANSWER, question, "", "three"))
    assert len(session.cached[2]) == len(session.cached[1]) + computed


def test_ctrl_c_twice(session):
    """The cache may be broken then, and is given up."""
    session.hook = press_at(1, 3, times=2)
    session.run("one", "two", "three", "q")
    assert session.cached[2] == []
    shown = session.text(1)
    session.check_cold(2, session.rendered("one", ANSWER, "two", shown, "three"))


def test_ctrl_c_is_the_shells_again(session):
    before = signal.getsignal(signal.SIGINT)
    session.hook = press_at(0, 2)
    session.run("one", "q")
    assert signal.getsignal(signal.SIGINT) is before


class TestErrors:
    @pytest.fixture
    def refused(self, session):
        """One line on standard error -> that line."""

        def run(*options: str, lines=()) -> str:
            session.lines = iter(lines)
            with pytest.raises(SystemExit) as ended:
                main(["--model", str(session.path), *options])
            assert ended.value.code == 1
            err = session.capsys.readouterr().err
            assert err.startswith("error: ")
            check_line(err[:-1])
            return err

        return run

    def test_missing_model(self, refused):
        assert "/no/such/place is no directory" in refused("--model", "/no/such/place")

    @pytest.mark.parametrize(
        ("option", "value"), [("--temp", "-1"), ("--stop", ""), ("--top-p", "2")]
    )
    def test_value_before_the_first_prompt(self, refused, option, value):
        assert option.strip("-").replace("-", "_") in refused(option, value)

    def test_chat_template_that_fails(self, refused, session, tmp_path):
        session.path = copy_of(session.path, tmp_path / "fails")
        template = session.path / "chat_template.jinja"
        template.write_text("{{ raise_exception('no\\nway') }}")
        assert "no way" in refused(lines=["one"])

    def test_usage(self, session):
        with pytest.raises(SystemExit) as ended:
            main(["--num-draft-tokens", "9"])
        assert ended.value.code == 2
        err = session.capsys.readouterr().err
        assert "0 to 8, or auto, not 9" in err.splitlines()[-1]


def test_process(path):
    """In a process of its own; the end of standard input ends it."""
    done = subprocess.run(
        [sys.executable, "-m", "mlx_mtp.chat", "--model", str(path)],
        input=b"one\ntwo \xff\ns\n",
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    assert done.stderr == b""
    assert done.returncode == 0
    out = done.stdout.decode()
    assert out.count(f">> {ANSWER}\n[") == 2
    cache = r"Cache: (\d+) tokens before the turn, (\d+) reused, \d+ computed"
    before, reused = re.search(cache, out).groups()
    assert before == reused != "0"
