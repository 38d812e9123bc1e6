"""Conversations as clients send them, templates as checkpoints have them: rendered as transformers does, or refused in time."""

import json
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from pydantic import BaseModel

from flexgen.runtime.requests import templates
from flexgen.runtime.requests.params import SamplingParams
from flexgen.runtime.requests.tokens import Tokens
from tests.runtime.small_tokenizer import small_tokenizer
from tests.runtime.test_llm import GREEDY, talker

torch.set_num_threads(1)
__all__ = ["talker"]
USER = [{"role": "user", "content": "the fox"}]
EVERYTHING = {"chat_template": None, "tools": None, "add_generation_prompt": True, "continue_final_message": False}


def text(messages, **arguments):
    return templates.render(small_tokenizer(), messages, {**EVERYTHING, **arguments})


def ids(messages, **arguments):
    return Tokens(small_tokenizer(), {}, {}, 340).chat(messages, **{**EVERYTHING, **arguments})


def test_token_ids_are_those_of_transformers():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": (1, 2.5)}}}]
    for arguments in ({}, {"mood": "!"}, {"tools": tools}, {"add_generation_prompt": False}):
        theirs = small_tokenizer().apply_chat_template(USER, **{**EVERYTHING, **arguments}, tokenize=True, return_dict=False)
        assert ids(USER, **arguments) == theirs
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    theirs = small_tokenizer().apply_chat_template(USER, **continued, tokenize=True, return_dict=False)
    assert ids(USER, **continued) == theirs


def test_what_chat_template_kwargs_hold_wins(talker):
    llm, _ = talker

    def prompt(**extra):
        (output,) = llm.chat(USER, GREEDY, use_tqdm=False, chat_template_kwargs=extra)
        return small_tokenizer().decode(output.prompt_token_ids)

    assert prompt(add_generation_prompt=False) == "<s><user>the fox"
    assert prompt(tools=[{"type": "function"}]) == "<s>[1 tools]<user>the fox|<assistant>"
    assert prompt(chat_template="{{ messages[0].content }}!") == "the fox!"
    assert prompt(continue_final_message=True, add_generation_prompt=False) == "<s><user>the fox"
    for name in ("tokenize", "return_dict", "return_tensors", "truncation", "max_length", "padding", "messages"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs holds {name}"):
            prompt(**{name: True})
    for bad, message in [([1], "must be a dict"), ({3: 1}, "keys must be names")]:
        with pytest.raises(TypeError, match=message):
            llm.chat(USER, GREEDY, use_tqdm=False, chat_template_kwargs=bad)
    with pytest.raises(TypeError, match="add_generation_prompt is 'no'"):
        prompt(add_generation_prompt="no")
    for tools in ("f", {"type": "function"}, 3, [3]):
        with pytest.raises(TypeError, match="tool"):
            prompt(tools=tools)


def test_functions_are_tools_and_files_are_templates(tmp_path):
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: where
        """

    template = "{{ tools[0].function.name }} {{ tools[0].function.parameters.required }}"
    assert text(USER, chat_template=template, tools=[weather]) == "weather ['city']"
    path = tmp_path / "x.jinja"
    path.write_text("file: {{ messages[0].content }}")
    assert text(USER, chat_template=str(path)) == text(USER, chat_template=path) == "file: the fox"
    with pytest.raises(ValueError, match="neither a template's text nor a file"):
        text(USER, chat_template="/nowhere/x.jinja")
    with pytest.raises(TypeError, match="chat_template is 3"):
        text(USER, chat_template=3)


CALLS = "{% for c in messages[0].tool_calls %}{{ c.function.name }}:{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}{% endfor %}[{{ messages[0].content }}]"  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    "arguments, wanted", [('{"city": "Rome", "n": 2}', "city=Rome;n=2;"), ({"city": "Rome"}, "city=Rome;"), ("", ""), (" ", "")]
)
def test_histories_of_openai_clients(arguments, wanted):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    for content in ({"content": None}, {}):
        assert text([{"role": "assistant", **content, "tool_calls": [call]}], chat_template=CALLS) == f"f:{wanted}[]"
    given = json.dumps(call)
    assert json.dumps(call) == given  # the caller's own stays as it is


@pytest.mark.parametrize(
    "calls, message",
    [
        ([{"function": {"name": "f", "arguments": "{"}}], "arguments are not JSON: '{'"),
        ([{"function": {"name": "f", "arguments": "[" * 100_000}}], "arguments are not JSON"),
        ([{"function": {"name": "f", "arguments": "[1]"}}], "must be a JSON object"),
        ([3], "tool_calls holds 3"),
        ({"function": 1}, "must be a list"),
    ],
)
def test_tool_calls_that_are_none_are_named(calls, message):
    with pytest.raises(ValueError, match=message) as caught:
        text([{"role": "assistant", "tool_calls": calls}])
    assert len(str(caught.value)) < 500


class Message(BaseModel):
    role: str
    content: str | None = None
    tool_calls: list | None = None


@dataclass
class Odd:
    role: str = "user"


def test_messages_that_are_objects(talker):
    llm, _ = talker
    (output,) = llm.chat([Message(role="user", content="the fox")], GREEDY, use_tqdm=False)
    assert small_tokenizer().decode(output.prompt_token_ids) == "<s><user>the fox|<assistant>"
    for message in (object(), 3, Odd(), None, "hello"):
        with pytest.raises(ValueError, match="a message is a dict with a 'role'"):
            llm.chat([message], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="holds <object object"):
        llm.chat([{"role": "user", "content": "a", "extra": object()}], GREEDY, use_tqdm=False)
    deep = {"role": "user", "content": "a"}
    for _ in range(500):
        deep = {"role": "user", "content": "a", "x": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        llm.chat([deep], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="conversation is empty"):
        llm.chat([], GREEDY, use_tqdm=False)


# hostile templates

LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
HOSTILE = {
    "nested loops": (LOOPS, "more than .* seconds"),
    "a power of powers": ("{{ 9**(9**9) }}", "more than .* seconds"),
    "doubled text": ("{% set n = namespace(s='x' * 999) %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "MiB of memory"),
    "a wide field": ("{{ '%*d' % (10**10, 1) }}", "MiB of memory|Error"),
    "a centred text": ("{{ 'a'.center(10**10) }}", "MiB of memory"),
    "much text": ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "characters, and|MiB of memory"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "overflow": ("{{ 2.0 ** 99999 }}", "OverflowError"),
    "a wrong type": ("{{ 'a' + 1 }}", "TypeError"),
    "a wrong key": ("{{ messages[99].content }}", "no element 99"),
    "its own exception": ("{{ raise_exception('no system role') }}", "no system role"),
    "no template": ("{% for %}", "Expected an expression"),
    "the interpreter": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
}


@pytest.mark.parametrize("template, why", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_ends_in_time_with_an_error_of_ours(template, why, monkeypatch):
    text(USER)  # the process is up
    monkeypatch.setattr(templates, "SECONDS", 2.0 if "seconds" in why else 30.0)
    started = time.monotonic()
    with pytest.raises(ValueError, match=f"the chat template cannot render these messages: .*({why})") as caught:
        text(USER, chat_template=template)
    assert time.monotonic() - started < 8 and len(str(caught.value)) < 3000
    monkeypatch.setattr(templates, "SECONDS", 30.0)
    assert text(USER) == "<s><user>the fox|<assistant>"


def test_templates_render_from_any_thread_and_together():
    found = []
    threads = [
        threading.Thread(target=lambda i=i: found.append((i, text([{"role": "user", "content": str(i)}])))) for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(i, f"<s><user>{i}|<assistant>") for i in range(12)]


def test_a_killed_process_is_started_again():
    text(USER)
    templates._worker._process.kill()
    templates._worker._process.wait()
    assert text(USER) == "<s><user>the fox|<assistant>"


def test_a_long_conversation_is_rendered_whole():
    long = [{"role": "user", "content": "fox " * 300_000}]
    assert text(long) == f"<s><user>{'fox ' * 300_000}|<assistant>"


def test_chat_of_many_prompts_is_quick(talker):
    llm, _ = talker
    text(USER)
    started = time.monotonic()
    llm.chat([USER] * 200, SamplingParams(max_tokens=1), use_tqdm=False)
    assert time.monotonic() - started < 20
