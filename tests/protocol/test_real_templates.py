"""Chat templates as publishers and servers have them: each is exact in all forms of calls, or refused in one line."""

import json
import re
import subprocess
import sys
import tarfile
import urllib.request
from datetime import datetime
from pathlib import Path

import pytest
from helpers.families import SCHEMAS, family_tokenizer, hermes_codec
from helpers.models import CHAT_TEMPLATE
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from arpo.data import tokenize_prompts
from arpo.errors import UserError
from arpo.protocol import HermesCodec, TagsCodec, XmlCodec, hermes, xml
from arpo.trajectory import Prompt
from extras import llama
from extras.llama import LlamaCodec

ASKED, ANSWER, SYSTEM = ({"role": role, "content": text} for role, text in (
    ("user", "who?"), ("assistant", "It is so."), ("system", "rule")
))  # fmt: skip
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NEXT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
FORMS = {"tags": TagsCodec, "hermes": HermesCodec, "xml": XmlCodec, "llama": LlamaCodec}


def codec_of(template, form: str = "tags"):
    tools = ("search", "python") if form == "tags" else SCHEMAS
    tokenizer = template if not isinstance(template, str) else family_tokenizer("qwen2_5", chat_template=template)
    return FORMS[form](tokenizer, tools=tools)


REFUSED = {  # report: (template, words)
    "iterates tools (Hermes-2-Pro, Hermes-3 tool_use)": (
        "{% for t in tools %}{{ t }}{% endfor %}" + TURN + NEXT, "TypeError"
    ),
    "length of tools (functiongemma)": ("{{ tools|length }}" + TURN + NEXT, "TypeError"),
    "functions of its own (firefunction-v2)": ("{{ functions.names }}" + TURN + NEXT, "UndefinedError: 'functions'"),
    "raises (Command-R's kind)": ("{{ raise_exception('tools are needed') }}" + TURN + NEXT, "tools are needed"),
    "named ones without a default (open-instruct#1805, lm-eval#1578)": ({"tool_use": TURN + NEXT}, "default"),
    "another header (functionary-medium-v3.2)": (
        TURN.replace("{{ m.content }}", "{{ 'all\n' if m.role == 'assistant' }}{{ m.content }}") + NEXT,
        r"assistant\\nall\\n'",
    ),
    "a channel (gpt-oss)": (
        TURN.replace("\n{{ m.content }}", "{{ '<|channel|>final' if m.role == 'assistant' else '\n' }}{{ m.content }}")
        + NEXT.replace("\n", ""), r"channel"
    ),
    "none of it in the told turn (Alpaca)": (
        "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}" + NEXT,
        r"generation prompt with '<\|im_start",
    ),
    "no generation prompt": (TURN, "no generation prompt"),
}  # fmt: skip


@pytest.mark.parametrize("report", REFUSED)
def test_a_template_that_cannot_be_exact_is_one_line_in_every_form(report):
    template, words = REFUSED[report]
    for form in FORMS:
        tokenizer = family_tokenizer("qwen2_5", chat_template=TURN)
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=words if form == "tags" else None) as error:
            codec_of(tokenizer, form)
        assert "\n" not in str(error.value)


LEADS = {  # report: template whose blanks between generation prompt, answer and end token the model writes
    "GLM-4: a line break behind the header": (TURN + NEXT.replace("\n", ""), "[\nIt is so.<|im_end|>]"),
    "Llama-2: blanks around the answer": (
        "{% for m in messages %}{{ '[INST] ' ~ m.content ~ ' [/INST]' if m.role == 'user' else ' ' ~ m.content|trim"
        " ~ ' <|im_end|>' }}{% endfor %}",
        "[ It is so. <|im_end|>]",
    ),
    "Mistral: the prompt ends without being asked to": (
        "{% for m in messages %}{{ '[INST]' ~ m.content ~ '[/INST]' if m.role == 'user' else m.content"
        " ~ '<|im_end|>' }}{% endfor %}",
        "[It is so.<|im_end|>]",
    ),
    "ChatML": (TURN + NEXT, "[It is so.<|im_end|>]"),
}


@pytest.mark.parametrize("report", LEADS)
def test_blanks_that_the_model_writes_are_trained(report):
    template, trained = LEADS[report]
    codec = codec_of(template)
    for conversation in ([ASKED, ANSWER], [ASKED, ANSWER, ASKED, ANSWER]):
        row = codec.render_conversation(conversation)
        whole = codec.tokenizer.apply_chat_template(conversation, tokenize=False)
        assert codec.tokenizer.decode(row.token_ids) == whole
        said = [i for i, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        assert f"[{codec.tokenizer.decode(said)}]" == "[" + trained[1:-1] * (len(conversation) // 2) + "]"


CALLS = (
    "{% if tools %}<|im_start|>system\n<tools>{{ tools|tojson }}</tools><|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}" + NEXT
)


def called(*, as_text: bool) -> dict[str, list[dict]]:
    """Conversations with calls; the arguments as objects or as OpenAI has them, in a text (Qwen3#1894,
    Qwen3-Coder#444, transformers#45419, dynamo#4161, oumi#2599)."""

    def calls(text: str, *names: str) -> dict:
        arguments = {"search": {"query": 'who & "why"?\n<b>'}, "python": {"code": "print('\u00e9\\n')\nx = 1 < 2"}}
        made = [
            {"id": f"c{name}", "type": "function", "function": {
                "name": name, "arguments": json.dumps(arguments[name]) if as_text else arguments[name]}}
            for name in names
        ]  # fmt: skip
        return {"role": "assistant", "content": text, "tool_calls": made}

    def result(name: str, text: str) -> dict:
        return {"role": "tool", "name": name, "tool_call_id": f"c{name}", "content": text}

    found, printed = result("search", "found <b>"), result("python", "3\n")
    return {
        "a call": [ASKED, calls("", "search"), found, ANSWER],
        "a text and a call": [ASKED, calls("I look.", "search"), found, ANSWER],
        "behind a rule": [SYSTEM, ASKED, calls("", "search"), found, ANSWER],
        "two at once": [ASKED, calls("", "search", "python"), found, printed, ANSWER],
        "two in turn": [ASKED, calls("", "search"), found, calls("", "python"), printed, ANSWER],
        "another question": [ASKED, calls("", "search"), found, ANSWER, ASKED, ANSWER],
        "at the end": [ASKED, calls("", "search")],
    }


PARSERS = {"hermes": hermes.parse_row, "xml": xml.parse_row, "llama": llama.parse_row}


def row_text(codec, form: str, messages: list[dict]) -> str:
    row = PARSERS[form]({"messages": messages})
    return codec.tokenizer.decode(codec.render_conversation(row.messages, functions=row.functions).token_ids)


def test_a_line_break_before_a_call_without_a_text_is_trained():
    """Bielik-11B-v3.0."""
    codec = codec_of(CALLS, "hermes")
    for messages in (called(as_text=False)[name] for name in ("a call", "a text and a call", "two in turn")):
        assert row_text(codec, "hermes", messages) == rendered(codec, messages, generation=False)


# Granite-3.3's, Hermes', Llama's, one more
@pytest.mark.parametrize("form", ["%B %d, %Y", "%Y-%m-%d", "%d %b %Y", "%A"])
def test_a_prompt_of_today_is_a_prompt_of_tomorrow(form):
    codec = codec_of(f"{{{{ strftime_now('{form}') }}}}" + TURN + NEXT)
    text = codec.tokenizer.decode(codec.render_prompt([ASKED]))
    assert text.startswith(datetime(2024, 7, 26).strftime(form) + "<|im_start|>")


def test_a_system_message_that_the_template_forbids_is_one_line_with_the_row():
    """Gemma-2's own line."""
    forbids = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    codec = codec_of(forbids + TURN + NEXT)
    prompts = [Prompt("q1", [ASKED], ["a"]), Prompt("q2", [SYSTEM, ASKED], ["a"])]
    options = {"max_prompt_tokens": 99, "overlong": "error", "path": "train.jsonl"}
    assert tokenize_prompts(prompts[:1], codec.render_prompt, **options)
    words = r"^train.jsonl: q2: .*system, user .*System role not supported.*system_prompt=n"
    with pytest.raises(UserError, match=words):
        tokenize_prompts(prompts, codec.render_prompt, **options)


def test_of_named_templates_the_one_for_tools_is_tried_for_tools():
    """Hermes-2 and -3 as published: `default` knows no tools."""
    own = hermes_codec("hermes")
    tokenizer = own.tokenizer
    whole = tokenizer.chat_template
    tokenizer.chat_template = {"default": CHAT_TEMPLATE, "tool_use": whole}
    both = HermesCodec(tokenizer, tools=SCHEMAS)
    assert both.render_prompt([ASKED]) == own.render_prompt([ASKED])
    assert TagsCodec(tokenizer).tokenizer.decode(TagsCodec(tokenizer).render_prompt([ASKED])) == (
        "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"
    )


# ---- the templates that llama.cpp and vLLM ship, out of their sources on the package index

SOURCES = ("llama_cpp_python-0.3.36", "vllm-0.33.0")
ENDS = (
    "<|im_end|>", "<|eot_id|>", "</s>", "<|end|>", "<end_of_turn>", "<|return|>", "<|eot|>", "<|END_OF_TURN_TOKEN|>",
    "<\uff5cend▁of▁sentence\uff5c>", "<|endoftext|>", "<|end_of_text|>", "<seed:eos>", "<|message_sep|>", "[e~[",
    "<SPECIAL_12>", "<sep>", "</assistant>", "<|role_end|>", "<turn|>",
)  # fmt: skip
SPECIAL = re.compile(
    r"<[|\uff5c][^<>{}'\" \n]{1,40}[|\uff5c]>|</?s>|\[/?INST\]|<(?:end|start)_of_turn>|<bos>|<eos>|<sep>"
)
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


def unpacked(source: str, folder: Path) -> list[Path]:
    """Fetch a source archive by the address that pip finds for it, and unpack its templates."""
    name, version = source.rsplit("-", 1)
    pip = [sys.executable, "-m", "pip", "download", "-vv", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    with subprocess.Popen(
        [*pip, f"{name}=={version}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        link = next((m[0] for line in run.stdout if (m := re.search(rf"https?://\S+/{source}\.tar\.gz", line))), "")
        run.kill()  # it would build the package next
    if not link:
        pytest.skip(f"no package index here has {source}")
    archive, _ = urllib.request.urlretrieve(link, folder / f"{source}.tar.gz")
    with tarfile.open(archive) as files:
        names = [member for member in files if member.name.endswith(".jinja") and "cookiecutter" not in member.name]
        files.extractall(folder, members=names, filter="data")
    return sorted((folder / source).rglob("*.jinja"))


def tokenizer_with(template: str, eos: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = sorted({"<s>", eos, *SPECIAL.findall(template)})
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["a"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, bos_token="<s>", chat_template=template, name_or_path="model"
    )


def rendered(codec, messages: list[dict], *, generation: bool) -> str:
    return codec.tokenizer.apply_chat_template(
        messages,
        tools=codec._functions(None),
        tokenize=False,
        add_generation_prompt=generation,
        enable_thinking=False,
        date_string="26 Jul 2024",
        strftime_now=datetime(2024, 7, 26).strftime,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source, least", [(SOURCES[0], 60), (SOURCES[1], 40)])
def test_the_templates_of_two_servers_are_exact_or_one_line(source, least, tmp_path):
    files = unpacked(source, tmp_path)
    assert len(files) >= least
    num_exact, num_with_calls, wrong = 0, 0, []
    for file in files:
        template = file.read_text()
        eos = next((end for end in ENDS if end in template), "</s>")
        for form in FORMS:
            try:
                codec = codec_of(tokenizer_with(template, eos), form)
            except UserError as error:
                wrong += [(file.name, form, str(error))] * ("\n" in str(error))
                continue
            for messages in ([ASKED, ANSWER], [SYSTEM, ASKED, ANSWER], [ASKED, ANSWER, ASKED, ANSWER]):
                try:
                    row = codec.render_conversation(messages)
                    prompt = codec.render_prompt(messages[:-1])
                except (ValueError, TemplateError, UserError):
                    continue
                ours = codec.tokenizer.decode(row.token_ids)
                asked, whole = (rendered(codec, m, generation=g) for m, g in ((messages[:-1], True), (messages, False)))
                if codec.tokenizer.decode(prompt) != asked:
                    wrong.append((file.name, form, "prompt"))
                # Some show a system message only while its question is the newest: a row has it as a rollout has.
                dropped = "rule" in asked and "rule" not in whole
                if not dropped and EMPTY_THOUGHT.sub("", ours) != EMPTY_THOUGHT.sub("", whole):
                    wrong.append((file.name, form, ours[-90:], whole[-90:]))
                num_exact += 1
            if form in PARSERS:
                num_called, differing = rows_with_calls(codec, form, OTHERWISE.get(file.name, ()))
                num_with_calls += num_called
                wrong += [(file.name, form, *one) for one in differing]
    assert not wrong and num_exact > least and num_with_calls > least, wrong


OTHERWISE = {
    # it writes a line break behind results, unless they are the newest messages, and drops texts beside calls
    "tool_chat_template_hermes.jinja": tuple(called(as_text=False)),
    # it counts messages without the system message, and so leaves out the end of the turn of results behind one
    "Bielik-11B-v3.0-Instruct.jinja": ("behind a rule",),
}
"""Where a row has what a rollout has, and not what the template makes of the whole conversation."""


def rows_with_calls(codec, form: str, otherwise: tuple[str, ...]) -> tuple[int, list[tuple[str, ...]]]:
    """Return how many conversations with calls are rows, and which of them are not what the template writes."""
    num_exact, wrong = 0, []
    for as_text in (False, True):
        for name, messages in called(as_text=as_text).items():
            try:
                whole = rendered(codec, called(as_text=False)[name], generation=False)
                ours = row_text(codec, form, messages)
            except (ValueError, TemplateError, UserError):  # two calls for Llama's; what the form refuses in one line
                continue
            num_exact += 1
            if name not in otherwise and EMPTY_THOUGHT.sub("", ours) != EMPTY_THOUGHT.sub("", whole):
                wrong.append((name, ours[-200:], whole[-200:]))
    return num_exact, wrong
