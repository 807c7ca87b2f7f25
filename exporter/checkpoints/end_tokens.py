"""Which tokens end a text, where a GGUF file does not say all of them: llama.cpp knows others by their spelling
(src/llama-vocab.cpp)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.decoding.text.template_files import templates
from runtime.errors import GumihoError

_SPELLED = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    )
)
# Behind these a model for code goes on to another file. Spelling counts where the file has no key.
OF_CODE = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_KEYS = "eos", "eot", "eom", *OF_CODE


def end_tokens(fields: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """The ids of tokens that end a text, those that the file names first. fields: the file's metadata; tokens: by
    id."""
    named = {key: fields.get(f"tokenizer.ggml.{key}_token_id") for key in _KEYS}
    ends = [i for i in named.values() if isinstance(i, int) and 0 <= i < len(tokens)]
    ids = {text: i for i, text in enumerate(tokens)}
    ends += sorted(ids[text] for text in _SPELLED & ids.keys())
    for key, spellings in OF_CODE.items():
        if named[key] is None:
            ends += [ids[text] for text in spellings if text in ids][:1]
    texts = {tokens[i] for i in ends}
    within = set[str]()  # which end a part of a text only
    if "<|end|>" in texts and (
        {"<|return|>", "<|call|>"} <= texts or ({"<|call|>", "<|calls|>"} & texts and "<|flush|>" in texts)
    ):
        within.add("<|end|>")
    if {"<|tool_response>", "<|plamo:eos|>"} & texts:
        within.add("</s>")
    return list(dict.fromkeys(i for i in ends if tokens[i] not in within))


def looks_like_an_end(text: str) -> bool:
    """Whether a token is a special one because of its spelling, whatever the file says."""
    return text in _SPELLED


def end_of_turn(folder: Path, tokenizer: Any, named: Mapping[str, str]) -> int | None:
    """The special token with which the chat template ends what the assistant said; None if there is none, or no
    template that takes such a conversation.

    tokenizer: a ``tokenizers.Tokenizer``. named: special tokens by the names that templates use, such as ``bos_token``.
    Raises what ``ChatTemplate.of`` raises.
    """
    if not templates(folder):
        return None
    from runtime.decoding.text.chat_template import ChatTemplate

    template, said = ChatTemplate.of(folder, named), "gumiho"
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
    try:
        text = template.render(messages, add_generation_prompt=False) if template else ""
    except GumihoError:
        return None
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    special |= {tokenizer.token_to_id(token) for token in named.values()}
    _, found, rest = text.rpartition(said)
    return (
        next((i for i in tokenizer.encode(rest, add_special_tokens=False).ids if i in special), None) if found else None
    )
