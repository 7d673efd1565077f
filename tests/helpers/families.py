"""Small tokenizers with the special tokens and chat templates of the families that the papers train, and SmolLM2's."""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from arpo.protocol import Codec, HermesCodec, TagsCodec, XmlCodec
from arpo.protocol.schema import ToolSchema
from extras.llama import LlamaCodec

TEMPLATES = Path(__file__).resolve().parent.parent / "protocol" / "chat_templates"
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|python_tag|>",
]  # fmt: skip
LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pieces in which Llama 3's tokenizers take a text, and about Qwen's: line breaks in a row are always one."""
FAMILIES = ("qwen2_5", "qwen3", "llama3_1", "smollm2")


def edited_template(family: str, changes: dict[str, str]) -> str:
    """A family's chat template with these texts replaced, each of which it has."""
    template = (TEMPLATES / f"{family}.jinja").read_text()
    for old, new in changes.items():
        assert old in template
        template = template.replace(old, new)
    return template


def opening_template() -> str:
    """Qwen2.5's, but its prompt opens a thought, as those of QwQ, Qwen3's thinking models and the R1 distills do."""
    template = (TEMPLATES / "qwen2_5.jinja").read_text()
    before, generation_prompt, end = template.rpartition("<|im_start|>assistant\\n")
    return f"{before}{generation_prompt}<think>\\n{end}"


def words_of(family: str) -> pre_tokenizers.PreTokenizer:
    """Parts a text into what may become one token."""
    if family not in ("llama3_1", *XML_FAMILIES):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    pattern = pre_tokenizers.Split(Regex(LLAMA_WORDS), behavior="isolated")
    return pre_tokenizers.Sequence([pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def family_tokenizer(family: str, **changes: str) -> PreTrainedTokenizerFast:
    """A small byte-level BPE with the family's special tokens, EOS, BOS and chat template."""
    special = LLAMA if family == "llama3_1" else CHATML
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words_of(family)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["<search> who </search> <result>\n\nsystem user assistant\n\n the answer is"] * 4, trainer
    )
    ends = {"eos_token": "<|eot_id|>", "bos_token": LLAMA[0]} if special is LLAMA else {"eos_token": "<|im_end|>"}
    template = (TEMPLATES / f"{family}.jinja").read_text()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(ends | {"chat_template": template} | changes))


def codec_of(family: str, *, enable_thinking: bool = True, **changes: str) -> Codec:
    return TagsCodec(family_tokenizer(family, **changes), enable_thinking=enable_thinking)


HERMES_FAMILIES = ("qwen2_5", "qwen3", "hermes")
HERMES_TOKENS = {
    "qwen2_5": ("<tool_call>", "</tool_call>"),
    "qwen3": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    "hermes": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "qwen3_5": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    "nemotron_3": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
}
"""Tags for which these families have tokens, which are not special to the tokenizer."""


def one_text(name: str, argument: str) -> ToolSchema:
    """The schema of a tool that takes one text."""
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return ToolSchema(name, f"The {name} tool.", parameters)


SCHEMAS = [one_text("python", "code"), one_text("search", "query")]


def hermes_codec(family: str, *, enable_thinking: bool = True, special: bool = False, **changes: str) -> HermesCodec:
    return HermesCodec(blocks_tokenizer(family, special, **changes), tools=SCHEMAS, enable_thinking=enable_thinking)


XML_FAMILIES = ("qwen3_coder", "qwen3_5", "nemotron_3")


def xml_codec(family: str, *, enable_thinking: bool = True, special: bool = False, **changes: str) -> XmlCodec:
    return XmlCodec(blocks_tokenizer(family, special, **changes), tools=SCHEMAS, enable_thinking=enable_thinking)


def blocks_tokenizer(family: str, special: bool = False, **changes: str) -> PreTrainedTokenizerFast:
    tokenizer = family_tokenizer(family, **changes)
    tokens = HERMES_TOKENS.get(family, ())
    tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in tokens], special_tokens=special)
    return tokenizer


def llama_codec(**changes: str) -> LlamaCodec:
    return LlamaCodec(family_tokenizer("llama3_1", **changes), tools=SCHEMAS)


def dialogue(*turns: str) -> list[dict[str, str]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def pieces(codec: Codec, row) -> list[tuple[str, int]]:
    """The row as (text, mask) runs, each decoded on its own: a token with text of two runs would tear characters."""
    runs: list[tuple[list[int], int]] = []
    for token, mask in zip(row.token_ids, row.loss_mask, strict=True):
        if not runs or runs[-1][1] != mask:
            runs.append(([], mask))
        runs[-1][0].append(token)
    return [(codec.tokenizer.decode(ids), mask) for ids, mask in runs]


EOS = dict.fromkeys(FAMILIES, "<|im_end|>") | {"llama3_1": "<|eot_id|>"}
BEGIN = dict.fromkeys(FAMILIES, "<|im_start|>assistant\n") | {
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>\n\n"
}
